"""The doors to ``load/tuning``: a call, a command, and ``num_workers="tune"``."""
