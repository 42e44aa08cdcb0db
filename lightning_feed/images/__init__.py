"""Images decoded by NVIDIA DALI, on the CPU or the GPU. Nothing here imports DALI before it is used."""
