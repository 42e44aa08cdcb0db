"""A report: a verdict, and where and when it was found."""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_feed.extras import installed_version
from lightning_feed.load.machine import read_machine
from lightning_feed.watch.verdict.diagnosis import Diagnosis


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and machine of a run, to compare two runs by. None: not installed, or not known."""

    lightning_feed: str | None = None
    python: str | None = None
    torch: str | None = None
    torchvision: str | None = None
    lightning: str | None = None
    pytorch_lightning: str | None = None
    platform: str | None = None
    """Operating system and C library, as Python names them."""
    cpu: str | None = None
    """Model of the CPU."""
    device: str | None = None
    """Model of the GPU."""
    usable_cpus: int | None = None
    """CPUs that the process may keep busy."""
    cpu_reason: str | None = None
    """The limit that gave ``usable_cpus``."""
    available_memory_bytes: int | None = None
    """Memory that could be taken when the report was written."""
    free_shm_bytes: int | None = None
    """Free space of /dev/shm then."""
    start_method: str | None = None
    """How worker processes start: ``fork``, ``forkserver`` or ``spawn``."""


@dataclass(frozen=True, kw_only=True)
class RemedyCheck:
    """The step time that a remedy was predicted to give, and the one that a later run with it achieved."""

    code: str
    """The remedy, as the earlier report put it."""
    changes: str
    """The setting that is in effect in the later run and was not in the earlier: ``num_workers=8``."""
    predicted_step_ms: float | None
    """Mean step that the earlier report predicted. None: it predicted none."""
    achieved_step_ms: float | None
    """Mean step of the later run."""
    error_pct: float | None
    """100 * (predicted - achieved) / achieved. Above 0: it became faster than predicted."""
    also_changed: tuple[str, ...] = ()
    """Other settings that changed between the runs, to which a part of the difference may be due."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A verdict, and all that is needed to compare it with another."""

    diagnosis: Diagnosis
    environment: Environment
    written_at: str
    """ISO 8601, UTC."""
    report_card: tuple[RemedyCheck, ...] = ()
    """What an earlier report predicted for this run. Empty: there was none to compare with, or none of its remedies
    is in effect."""
    path: Path | None = None
    """The file that it was read from."""

    def __repr__(self) -> str:
        return f"<Report of {self.written_at}: {self.diagnosis!r}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from lightning_feed.watch.reports.files import as_html, in_frame  # which import this module

        return in_frame(as_html(self))


def read_environment(root: Path = Path("/")) -> Environment:
    """Versions of the installed packages, and the limits of this process.

    The GPU is named only where CUDA is in use already: asking would start it.

    Args:
        root: the file system to read ``proc``, ``sys`` and ``dev/shm`` from.
    """
    machine = read_machine(root)
    torch = sys.modules.get("torch")  # importing it takes a second, and without it nothing runs on a device
    packages = ("lightning-feed", "torch", "torchvision", "lightning", "pytorch-lightning")
    limits = ("usable_cpus", "cpu_reason", "available_memory_bytes", "free_shm_bytes", "start_method")
    return Environment(
        **{name.replace("-", "_"): installed_version(name) for name in packages},
        **{name: getattr(machine, name) for name in limits},
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_model(root),
        device=str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_initialized() else None,
    )


def rate(step_ms: float | None, batch_size: int | None) -> float | None:
    """Samples per second at a step time; None where one of both is not known or the step took no time."""
    return None if not step_ms or batch_size is None else 1000 * batch_size / step_ms


def _cpu_model(root: Path) -> str | None:
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine()) or None
