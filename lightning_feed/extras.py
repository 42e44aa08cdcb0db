"""Optional dependencies: imported only where they are used, with a pip line to paste if they are missing."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from lightning_feed.errors import MissingExtraError


def require(module: str, *, extra: str, why: str) -> ModuleType:
    """Import an optional module. If it is missing, the error names the command to install it.

    Args:
        module: the module to import, for example ``"skimage.data"``.
        extra: the extra of this package that installs it.
        why: the feature that needs it, as the subject of a sentence ("making the demo's images").

    Raises:
        MissingExtraError: if the module is not installed.

    Example:
        >>> require("json", extra="demo", why="writing the report").__name__
        'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # the module is installed, but one of its own imports is not
        raise MissingExtraError(
            f"{why} needs {error.name}. Install it:  pip install 'lightning-feed[{extra}]'"
        ) from error


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
