"""Images decoded by NVIDIA DALI, on the CPU or the GPU. DALI is imported on first use."""
