"""``tune()`` and the command ``lightning-feed tune``; ``num_workers="tune"`` is in ``trials/in_fit``."""
