"""The verdict: the limit of training and its remedies, a pure function of the measurements."""
