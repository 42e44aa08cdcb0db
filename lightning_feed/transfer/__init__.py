"""Transfer: copy batches from the host to the device ahead of time, or keep a dataset on the device."""
