"""The doctor: one look at the machine and the environment, for what would keep a GPU from being fed."""
