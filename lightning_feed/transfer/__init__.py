"""Station 4 of the road: host batch -> device batch."""
