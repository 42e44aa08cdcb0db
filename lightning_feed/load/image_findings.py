"""What was measured of a folder of images, with which backend: remembered between runs, for ``backend="auto"``."""

import hashlib
import json
import logging
import math
import os
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lightning_feed.archive.files import cache_folder, read_private, write_private
from lightning_feed.load.machine import read_machine

logger = logging.getLogger(__name__)

_VERSION = 1
_RATES = ("samples_per_s", "loader_samples_per_s", "model_samples_per_s", "device_samples_per_s")


@dataclass(frozen=True, kw_only=True)
class ImageFinding:
    """What one command measured of one backend, on one device. None: not measured.

    Raises:
        ValueError: for figures that cannot be.
    """

    backend: str
    by: Literal["diagnose", "tune"]
    day: str
    """As ``2026-11-21``."""
    batch_size: int
    cpu_bound: bool
    """Training waits for batches, and the CPUs that make them are busy."""
    starved_pct: float
    """Share of step time that training waits for data, 0 to 100: measured by ``diagnose``, predicted by ``tune``."""
    samples_per_s: float | None = None
    """That training takes as it is."""
    loader_samples_per_s: float | None = None
    """That the loader alone gives."""
    model_samples_per_s: float | None = None
    """That the model takes when it never waits."""
    device_samples_per_s: float | None = None
    """That the device decodes, crops and resizes, with nothing beside it."""
    movable_pct: float | None = None
    """Share of the workers' time for a sample that is not reading, 0 to 100."""
    num_workers: int | None = None
    usable_cpus: int | None = None

    def __post_init__(self) -> None:
        checks = {
            **{name: _is_number(getattr(self, name), 0, math.inf) for name in _RATES},
            "movable_pct": _is_number(self.movable_pct, 0, 100),
            "starved_pct": self.starved_pct is not None and _is_number(self.starved_pct, 0, 100),
            "cpu_bound": type(self.cpu_bound) is bool,
            "batch_size": type(self.batch_size) is int and self.batch_size > 0,
            **{name: type(getattr(self, name)) in (int, type(None)) for name in ("num_workers", "usable_cpus")},
            **{name: isinstance(getattr(self, name), str) for name in ("backend", "by", "day")},
        }
        wrong = [f"{name}={getattr(self, name)!r}" for name, right in checks.items() if not right]
        if wrong:
            raise ValueError(f"no finding can have {', '.join(wrong)}")


def _is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is finite and within these; None is, too."""
    return value is None or (isinstance(value, (int, float)) and least <= value <= most and math.isfinite(value))


def key_of_images(root: Path, *, image_size: int, quality: str, device: str) -> dict[str, Any]:
    """What must be the same for a finding to hold: machine, device, folder, and what is made of its images.

    Args:
        root: the folder, or the pack.
        image_size: pixels.
        quality: of decoding.
        device: its model, or ``cpu``.
    """
    return {
        "host": socket.gethostname(),
        "cpus": read_machine().usable_cpus,
        "device": device,
        "data": os.fsencode(root.resolve()).hex(),
        "image_size": image_size,
        "quality": quality,
    }


class ImageFindings:
    """A folder of findings. One that cannot be read or written is as good as none, and is no error.

    Args:
        folder: None for ``images`` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder() / "images"

    def load(self, key: dict[str, Any]) -> tuple[ImageFinding, ...]:
        """What was saved under ``key``, at most one for each backend and command."""
        path = self._path(key)
        try:
            kept = json.loads(read_private(path))
            if kept["version"] != _VERSION or kept["key"] != key:
                return ()
            return tuple(_finding(one) for one in kept["findings"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as error:  # cut short, or of something else
            logger.debug("What was measured of the images, in %s, cannot be read (%s): it does not count.", path, error)
            return ()

    def save(self, key: dict[str, Any], finding: ImageFinding) -> None:
        """Remember a finding, in place of what the same command found of the same backend."""
        path = self._path(key)
        kept = [one for one in self.load(key) if (one.backend, one.by) != (finding.backend, finding.by)]
        found = [asdict(one) for one in (*kept, finding)]
        text = json.dumps({"version": _VERSION, "key": key, "findings": found}, indent=1)
        try:
            write_private(path, text.encode())
        except OSError as error:
            logger.info(
                'What was measured of the images could not be remembered in %s: %s. backend="auto" does not know it.',
                path,
                error,
            )

    def _path(self, key: dict[str, Any]) -> Path:
        text = json.dumps([_VERSION, key], sort_keys=True)
        return self.folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def _finding(kept: dict[str, Any]) -> ImageFinding:
    known = {one.name for one in fields(ImageFinding)}
    return ImageFinding(**{name: value for name, value in kept.items() if name in known})
