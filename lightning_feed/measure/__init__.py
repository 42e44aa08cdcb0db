"""Measuring whether the GPU waits, and for what."""
