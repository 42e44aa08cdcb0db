"""What the doctor reads from. Tests give others."""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any


def installed_version(package: str) -> str | None:
    """The version of a package that is installed, without importing it; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def own_requirements() -> list[str]:
    """What this package asks for, as in its metadata (``"torch>=2.6"``)."""
    try:
        return requires("lightning-feed") or []
    except PackageNotFoundError:
        return []


def read_limit(name: str) -> tuple[int, int]:
    """(soft, hard) of a limit of this process, such as ``"RLIMIT_NOFILE"``; -1 is no limit (getrlimit(2))."""
    resource = importlib.import_module("resource")  # not on every system
    soft, hard = resource.getrlimit(getattr(resource, name))
    return soft, hard


def read_space(folder: Path) -> tuple[int, int]:
    """(size, free) of the file system of a folder, bytes.

    Raises:
        OSError: when it is not there.
    """
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where everything is read from; by default this machine and this process."""

    root: Path = Path("/")
    """The file system to read ``proc``, ``sys`` and ``dev/shm`` from."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment variables."""
    load: Callable[[str], Any] = importlib.import_module
    """Imports a module; an ImportError says that it is absent."""
    version: Callable[[str], str | None] = installed_version
    """Version of an installed package."""
    requirements: Callable[[], list[str]] = own_requirements
    """What this package needs."""
    limit: Callable[[str], tuple[int, int]] = read_limit
    """Limits of the process."""
    space: Callable[[Path], tuple[int, int]] = read_space
    """Size and free space of a file system."""
