"""``python -m lightning_feed`` is ``lightning-feed``."""

import sys

from lightning_feed.cli import main

sys.exit(main())
