"""Loading: samples to host batches."""
