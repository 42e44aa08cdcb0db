"""Decoders from encoded bytes to uint8 RGB pixels, shape (H, W, 3)."""
