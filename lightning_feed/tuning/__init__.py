"""``tune()`` and the command; ``num_workers="tune"`` is in ``load/trials/in_fit``."""
