"""Station 3 of the road: samples -> host batches."""
