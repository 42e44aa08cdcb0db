"""The loader settings that fit: found by a few trials, remembered."""
