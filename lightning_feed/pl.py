"""The public names for users of the ``pytorch_lightning`` package, a separate tree of classes."""

from lightning_feed.callbacks.autotune import AutotuneCallback as _AutotuneCallback
from lightning_feed.callbacks.prefetch import PrefetchCallback as _PrefetchCallback
from lightning_feed.callbacks.starvation import GPUStarvationCallback as _GPUStarvationCallback
from lightning_feed.data.datamodule import FeedDataModule
from lightning_feed.data.images import FeedImageFolder
from lightning_feed.extras import require

require("pytorch_lightning", extra="pl", why="lightning_feed.pl")

from pytorch_lightning import Callback, LightningDataModule  # noqa: E402  # after the line that says how to install it


# The type of the Trainer differs between the packages, and mypy checks our use of both against that of lightning.
class FastDataModule(FeedDataModule, LightningDataModule):  # type: ignore[misc]
    """``lightning_feed.FastDataModule``, on the base class of the ``pytorch_lightning`` package."""


class ImageFolderDataModule(FeedImageFolder, LightningDataModule):  # type: ignore[misc]  # as above
    """``lightning_feed.ImageFolderDataModule``, on the base class of the ``pytorch_lightning`` package."""


# pytorch_lightning 2.4 refuses callbacks that are not of its own Callback class; in 2.6 its LightningCLI still does.
class PrefetchCallback(_PrefetchCallback, Callback):  # type: ignore[misc]  # the trees differ in the type of Trainer
    """``lightning_feed.PrefetchCallback`` that is also a callback of the ``pytorch_lightning`` package."""


class GPUStarvationCallback(_GPUStarvationCallback, Callback):  # type: ignore[misc]  # as above
    """``lightning_feed.GPUStarvationCallback`` that is also a callback of the ``pytorch_lightning`` package."""


class AutotuneCallback(_AutotuneCallback, Callback):  # type: ignore[misc]  # as above
    """``lightning_feed.AutotuneCallback`` that is also a callback of the ``pytorch_lightning`` package."""
