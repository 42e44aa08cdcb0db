"""Images decoded by NVIDIA DALI, on the CPU or the GPU. DALI is imported only when it is first used."""
