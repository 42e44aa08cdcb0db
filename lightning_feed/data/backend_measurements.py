"""Measurements of an image folder with a backend, by diagnose and tune, remembered between runs for "auto"."""

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_feed.archive.remote import is_url, without_secrets
from lightning_feed.archive.system import cache_folder, read_private, write_private
from lightning_feed.data.base import DataModuleBase
from lightning_feed.load.machine import read_machine
from lightning_feed.load.trials.search import Tuned
from lightning_feed.watch.verdict.causes import BUSY_PCT, shares_of
from lightning_feed.watch.verdict.diagnosis import Cause, Diagnosis, LoopFacts
from lightning_feed.watch.verdict.predict import read_share

logger = logging.getLogger(__name__)

_VERSION = 1
_CPU_CAUSES: tuple[Cause, ...] = ("cpu", "oversubscribed", "no workers")
"""Of waiting for data."""


@dataclass(frozen=True, kw_only=True)
class BackendMeasurement:
    """One command's measurement of one backend, on one device. None: not measured."""

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


def measurement_key(root: Any, device: torch.device, *, image_size: int, quality: str) -> dict[str, Any]:
    """What must be the same for a measurement to hold: machine, device, folder, and what is made of its images.

    Args:
        root: the folder, or the pack.
        device: whose model counts.
        image_size: pixels.
        quality: of decoding.
    """
    return {
        "host": socket.gethostname(),
        "cpus": read_machine().usable_cpus,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "data": os.fsencode(without_secrets(root) if is_url(root) else Path(root).resolve()).hex(),
        "image_size": image_size,
        "quality": quality,
    }


class BackendMeasurements:
    """A folder of measurements. One that cannot be read or written is as good as none, and is no error.

    Args:
        folder: None for ``images`` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder() / "images"

    def load(self, key: dict[str, Any]) -> tuple[BackendMeasurement, ...]:
        """What was saved under ``key``, at most one for each backend and command."""
        path = self._path(key)
        known = {one.name for one in fields(BackendMeasurement)}  # a newer version may add some
        try:
            kept = json.loads(read_private(path))
            findings = kept["findings"] if kept["version"] == _VERSION and kept["key"] == key else ()
            return tuple(
                BackendMeasurement(**{name: value for name, value in one.items() if name in known}) for one in findings
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # none, cut short, something else
            logger.debug("What was measured of the images, in %s, cannot be read (%s): it does not count.", path, error)
            return ()

    def save(self, key: dict[str, Any], measured: BackendMeasurement) -> None:
        """Remember a measurement, in place of what the same command measured of the same backend."""
        path = self._path(key)
        kept = [one for one in self.load(key) if (one.backend, one.by) != (measured.backend, measured.by)]
        found = [asdict(one) for one in (*kept, measured)]
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


def measurement_of_diagnosis(diagnosis: Diagnosis, day: str) -> BackendMeasurement | None:
    """The measurement of a diagnosis; None where it was of no image folder, too short, or of other work than decoding.

    Args:
        diagnosis: with or without experiments.
        day: of it, as ``2026-11-21``.
    """
    measured = diagnosis.measurements
    facts, found, shares = measured.facts, measured.experiments, shares_of(measured)
    size = facts.batch_size
    if not _of_decoding(facts) or shares is None or not size:
        return None
    left = read_share(measured)
    return BackendMeasurement(
        backend=facts.backend or "torch",
        by="diagnose",
        day=day,
        batch_size=size,
        cpu_bound=diagnosis.cause in _CPU_CAUSES,
        starved_pct=min(100.0, 100 * shares.data_ms / shares.step_ms),
        samples_per_s=1e3 * size / shares.step_ms,
        loader_samples_per_s=_images(found.loader_per_s, size) if found else None,
        model_samples_per_s=_images(found.model_per_s, size) if found else None,
        device_samples_per_s=_images(found.device_decode_per_s, size) if found else None,
        movable_pct=None if left is None else 100 * (1 - left),
        num_workers=facts.num_workers,
        usable_cpus=facts.usable_cpus,
    )


def measurement_of_tuning(
    tuned: Tuned, facts: LoopFacts, *, cpus: float, ranks: int, day: str
) -> BackendMeasurement | None:
    """The measurement of a tuning; None where it was of no image folder, or without knowing what the model can take.

    Args:
        tuned: what was found.
        facts: of the data module.
        cpus: that the loaders may keep busy.
        ranks: that load at once on them.
        day: of it, as ``2026-11-21``.
    """
    rate, demand, size = tuned.batches_per_s, tuned.demand_per_s, tuned.batch_size
    if not _of_decoding(facts) or not rate or not demand or not size or tuned.starved_pct is None:
        return None
    spent = [trial.cpu_s_per_batch for trial in tuned.trials if trial.batches_per_s == rate and trial.cpu_s_per_batch]
    busy_pct = 100 * max(spent, default=0.0) * rate * ranks / cpus
    return BackendMeasurement(
        backend=facts.backend or "torch",
        by="tune",
        day=day,
        batch_size=size,
        cpu_bound=tuned.starved_pct > 0 and busy_pct >= BUSY_PCT,
        starved_pct=min(100.0, tuned.starved_pct),
        loader_samples_per_s=rate * size,
        model_samples_per_s=demand * size,
    )


def remember_diagnosis(datamodule: Any, device: torch.device, diagnosis: Diagnosis) -> None:
    """Keep what a diagnosis says of an image folder, for ``backend="auto"``; nothing for other data modules."""
    _keep(datamodule, device, lambda: measurement_of_diagnosis(diagnosis, _today()))


def remember_tuning(datamodule: Any, device: torch.device, tuned: Tuned, *, ranks: int) -> None:
    """The same of a tuning, while the data module is set up for it."""

    def measured() -> BackendMeasurement | None:
        facts, machine = LoopFacts(**datamodule._feed_facts()), read_machine()
        cpus = machine.cpu_time or machine.usable_cpus
        return measurement_of_tuning(tuned, facts, cpus=cpus, ranks=ranks, day=_today())

    _keep(datamodule, device, measured)


def _keep(datamodule: Any, device: torch.device, measure: Callable[[], BackendMeasurement | None]) -> None:
    key = datamodule._feed_measurement_key(device) if isinstance(datamodule, DataModuleBase) else None
    measured = None if key is None else measure()
    if key is not None and measured is not None:
        BackendMeasurements().save(key, measured)


def _of_decoding(facts: LoopFacts) -> bool:
    """Whether what the workers do could be done by another backend."""
    return facts.decoder is not None and not facts.own_transforms and facts.cache in (None, "off", "bytes")


def _images(batches_per_s: float | None, size: int) -> float | None:
    return batches_per_s * size if batches_per_s else None


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()
