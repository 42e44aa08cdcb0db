"""The training loader of a running fit: whether it may be tuned, and what replaces it."""
