"""``tune()`` and the command; ``num_workers="tune"`` is in ``trials/in_fit``."""
