"""Transfer: host batches to device batches."""
