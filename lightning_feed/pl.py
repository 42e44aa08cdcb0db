"""FastDataModule for users of the ``pytorch_lightning`` package, a separate tree of classes."""

from lightning_feed.datamodule import FeedDataModule
from lightning_feed.extras import require

require("pytorch_lightning", extra="pl", why="lightning_feed.pl")

from pytorch_lightning import LightningDataModule  # noqa: E402  # after the line that says how to install it


class FastDataModule(FeedDataModule, LightningDataModule):
    """``lightning_feed.FastDataModule``, on the base class of the ``pytorch_lightning`` package."""
