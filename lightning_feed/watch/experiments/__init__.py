"""Proof by experiment: one part of the road changed at a time, and timed."""
