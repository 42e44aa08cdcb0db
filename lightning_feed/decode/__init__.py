"""Encoded bytes -> uint8 pixels, (H, W, 3) RGB."""
