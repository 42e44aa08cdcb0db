"""Experiments on the loader: one part of the input pipeline changed at a time, and timed."""
