"""``tune()`` and the command; ``num_workers="tune"`` is in ``load/tuning/in_fit``."""
