"""Search for the best loader settings by a few trials, and a store of the results."""
