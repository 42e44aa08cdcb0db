"""Loading: make batches on the host from the samples of a dataset."""
