"""What ``diagnose`` and ``tune`` measured of an ImageFolderDataModule, as a finding to choose its backend by."""

from datetime import datetime, timezone
from typing import Any

from lightning_feed.load.image_findings import ImageFinding, ImageFindings
from lightning_feed.load.machine import read_machine
from lightning_feed.load.tuning.search import Tuned
from lightning_feed.watch.verdict.causes import BUSY_PCT
from lightning_feed.watch.verdict.diagnosis import Cause, Diagnosis, LoopFacts
from lightning_feed.watch.verdict.predict import read_share
from lightning_feed.watch.verdict.shares import shares_of

_CPU_CAUSES: tuple[Cause, ...] = ("cpu", "oversubscribed", "no workers")
"""Of waiting for data."""


def finding_of_diagnosis(diagnosis: Diagnosis, day: str) -> ImageFinding | None:
    """The finding of a diagnosis; None where it was of no image folder, too short, or of other work than decoding.

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
    return ImageFinding(
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


def finding_of_tuning(tuned: Tuned, facts: LoopFacts, *, cpus: float, ranks: int, day: str) -> ImageFinding | None:
    """The finding of a tuning; None where it was of no image folder, or without knowing what the model can take.

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
    return ImageFinding(
        backend=facts.backend or "torch",
        by="tune",
        day=day,
        batch_size=size,
        cpu_bound=tuned.starved_pct > 0 and busy_pct >= BUSY_PCT,
        starved_pct=min(100.0, tuned.starved_pct),
        loader_samples_per_s=rate * size,
        model_samples_per_s=demand * size,
    )


def remember_diagnosis(datamodule: Any, device: Any, diagnosis: Diagnosis) -> None:
    """Keep what a diagnosis says of an image folder, for ``backend="auto"``; nothing for other data modules."""
    if hasattr(datamodule, "_images_key"):
        _keep(datamodule, device, finding_of_diagnosis(diagnosis, _today()))


def remember_tuning(datamodule: Any, device: Any, tuned: Tuned, *, ranks: int) -> None:
    """The same of a tuning, while the data module is set up for it."""
    if hasattr(datamodule, "_images_key"):
        facts = LoopFacts(**datamodule._feed_facts())
        machine = read_machine()
        cpus = machine.cpu_time or machine.usable_cpus
        _keep(datamodule, device, finding_of_tuning(tuned, facts, cpus=cpus, ranks=ranks, day=_today()))


def _keep(datamodule: Any, device: Any, finding: ImageFinding | None) -> None:
    if finding is not None:
        ImageFindings().save(datamodule._images_key(device), finding)


def _of_decoding(facts: LoopFacts) -> bool:
    """Whether what the workers do could be done by another backend."""
    return facts.decoder is not None and not facts.own_transforms and facts.cache in (None, "off", "bytes")


def _images(batches_per_s: float | None, size: int) -> float | None:
    return batches_per_s * size if batches_per_s else None


def _today() -> str:
    return datetime.now(timezone.utc).date().isoformat()
