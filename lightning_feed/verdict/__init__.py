"""The verdict: what limits training, and the remedies, as a pure function of the measurements."""
