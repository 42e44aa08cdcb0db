"""Earlier name of :mod:`lightning_feed.storage`."""

from importlib import import_module


def __getattr__(name: str) -> object:
    return getattr(import_module("lightning_feed.storage"), name)
