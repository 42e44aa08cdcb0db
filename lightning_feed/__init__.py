"""Plugins for PyTorch Lightning that keep the GPU fed.

Names are imported on first use, because importing Lightning takes seconds.
"""

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_feed.any_loop import watch_loader as watch_loader
    from lightning_feed.callbacks.autotune import AutotuneCallback as AutotuneCallback
    from lightning_feed.callbacks.prefetch import PrefetchCallback as PrefetchCallback
    from lightning_feed.callbacks.starvation import GPUStarvationCallback as GPUStarvationCallback
    from lightning_feed.data.datamodule import FastDataModule as FastDataModule
    from lightning_feed.data.images import ImageFolderDataModule as ImageFolderDataModule
    from lightning_feed.diagnosing import diagnose as diagnose
    from lightning_feed.diagnosing.tune import tune as tune
    from lightning_feed.errors import FeedError as FeedError
    from lightning_feed.images.dali_binding import DaliOptions as DaliOptions
    from lightning_feed.images.decode_ahead import NvJpegOptions as NvJpegOptions
    from lightning_feed.load.settings import LoaderSettings as LoaderSettings

__version__ = "0.1.0"

_HOMES = {
    "AutotuneCallback": "lightning_feed.callbacks.autotune",
    "DaliOptions": "lightning_feed.images.dali_binding",
    "FastDataModule": "lightning_feed.data.datamodule",
    "FeedError": "lightning_feed.errors",
    "GPUStarvationCallback": "lightning_feed.callbacks.starvation",
    "ImageFolderDataModule": "lightning_feed.data.images",
    "LoaderSettings": "lightning_feed.load.settings",
    "NvJpegOptions": "lightning_feed.images.decode_ahead",
    "PrefetchCallback": "lightning_feed.callbacks.prefetch",
    "diagnose": "lightning_feed.diagnosing",
    "tune": "lightning_feed.diagnosing.tune",
    "watch_loader": "lightning_feed.any_loop",
}
__all__ = list(_HOMES)


class _ConsoleHandler(logging.Handler):
    """Writes our log lines to ``stderr``, unless the root logger has a handler, which then prints them."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # closed, gone, or None: there is no other place to write to
            return


_logger = logging.getLogger(__name__)
if not _logger.handlers:
    _logger.addHandler(_ConsoleHandler())
if _logger.level == logging.NOTSET:  # keep a level that the user has set
    _logger.setLevel(logging.INFO)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
