"""The machine: its limits, files and mounts, as far as this process may use them."""
