"""Images: datasets, crops, and decoders on the CPU and the GPU. NVIDIA DALI is imported on first use."""
