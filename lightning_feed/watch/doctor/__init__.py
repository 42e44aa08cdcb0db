"""The machine and the environment, looked at once."""
