"""A report: a verdict with its headline, and where and when it was found."""

import math
import platform
import shlex
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from lightning_feed.extras import installed_version
from lightning_feed.machine.file_system import file_system
from lightning_feed.machine.limits import cpu_model, read_machine
from lightning_feed.measure.stats import RankStats, ratio
from lightning_feed.report.words import LOOP_WORDS, share_text, toy_sentence
from lightning_feed.verdict.diagnosis import Diagnosis
from lightning_feed.verdict.remedies import may_try_workers
from lightning_feed.verdict.shares import Shares, grade_of, is_toy_step, shares_of
from lightning_feed.wording import plural


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and machine of a run, by which runs are compared. Fields are None if not installed, or not known."""

    lightning_feed: str | None = None
    """Version of lightning_feed."""
    python: str | None = None
    """Version of Python."""
    torch: str | None = None
    """Version of torch."""
    torchvision: str | None = None
    """Version of torchvision."""
    lightning: str | None = None
    """Version of the package ``lightning``."""
    pytorch_lightning: str | None = None
    """Version of the package ``pytorch_lightning``."""
    platform: str | None = None
    """Operating system and C library, as Python names them."""
    cpu: str | None = None
    """Model of the CPU."""
    device: str | None = None
    """Model of the GPU."""
    usable_cpus: int | None = None
    """CPUs that the process may keep busy."""
    cpu_reason: str | None = None
    """Name of the limit from which ``usable_cpus`` follows."""
    available_memory_bytes: int | None = None
    """Memory that was available to the process when the report was written."""
    free_shm_bytes: int | None = None
    """Free space of /dev/shm when the report was written."""
    file_system: str | None = None
    """Type and kind of the file system of the working folder: ``ext4, local``."""
    start_method: str | None = None
    """Start method of worker processes: ``fork``, ``forkserver`` or ``spawn``."""


NOTEBOOK = "notebook"
"""The program of a run in a notebook."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The run that a report is about. Fields are empty if not known, as in reports of earlier versions."""

    program: str = ""
    """The program as passed to Python: ``train.py``, ``-m package.train``; in a notebook: ``notebook``."""
    has_arguments: bool = False
    """True if the program was given arguments. A report does not keep them, because they may hold passwords."""
    folder: str = ""
    """Name of the run's folder, such as ``version_3``."""
    id: str = ""
    """Random name, different for each run."""

    @property
    def name(self) -> str:
        """The name of the run in titles: ``train.py, version_3``."""
        program = self.program.removeprefix("-m ")
        return ", ".join(filter(None, (Path(program).name, self.folder)))


@dataclass(frozen=True, kw_only=True)
class Report:
    """A verdict, and all that is needed to compare it with another verdict."""

    diagnosis: Diagnosis
    environment: Environment
    written_at: str
    """Time at which the report was made: ISO 8601, UTC."""
    run: RunIdentity = field(default_factory=RunIdentity)
    """The run that the report is about."""
    path: Path | None = None
    """The file that the report was read from; None if it was made in this process."""
    page: ClassVar[Callable[["Report"], str] | None] = None
    """Function that makes the page for a notebook; set when the module ``report.files`` is imported."""

    def __repr__(self) -> str:
        return f"<Report of {self.written_at}: {headline(self.diagnosis)}>"

    def _repr_html_(self) -> str | None:
        """Return the page for a notebook; None if the module ``report.files`` was not imported."""
        make_page = type(self).page
        return make_page and make_page(self)


def read_environment(root: Path = Path("/")) -> Environment:
    """Return the versions of the installed packages, and the limits of this process.

    The GPU is named only if CUDA is initialized already, because asking for its name would initialize CUDA.

    Args:
        root: the file system to read ``proc``, ``sys`` and ``dev/shm`` from.
    """
    machine = read_machine(root)
    torch = sys.modules.get("torch")  # not imported, which takes a second: without torch, nothing runs on a device
    device = None
    if torch is not None and torch.cuda.is_initialized():
        device = str(torch.cuda.get_device_name())
    return Environment(
        lightning_feed=installed_version("lightning-feed"),
        python=platform.python_version(),
        torch=installed_version("torch"),
        torchvision=installed_version("torchvision"),
        lightning=installed_version("lightning"),
        pytorch_lightning=installed_version("pytorch-lightning"),
        platform=platform.platform(),
        cpu=cpu_model(root),
        device=device,
        usable_cpus=machine.usable_cpus,
        cpu_reason=machine.cpu_reason,
        available_memory_bytes=machine.available_memory_bytes,
        free_shm_bytes=machine.free_shm_bytes,
        file_system=_file_system(root),
        start_method=machine.start_method,
    )


_NO_PROGRAM = ("", "-", "-c", "-m")
_OURS = ("lightning-feed", "lightning_feed")


def read_identity(folder: str = "") -> RunIdentity:
    """Return the identity of a run that begins in this process.

    Args:
        folder: name of the run's folder.
    """
    program = read_program()
    has_arguments = bool(program) and program != NOTEBOOK and len(sys.argv) > 1
    return RunIdentity(program=program, has_arguments=has_arguments, folder=folder, id=uuid.uuid4().hex)


def read_program() -> str:
    """Return the program that runs in this process, as in :attr:`RunIdentity.program`."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        return NOTEBOOK
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec is not None else (*sys.argv, "")[0]
    if name in _NO_PROGRAM or Path(name).name in _OURS:
        return ""
    return name if spec is None else f"-m {name}"


_LONGEST_ARGUMENTS = 60


def arguments_now() -> str:
    """Return the arguments of this process, as they are typed in a shell; if they are long, ``SAME ARGUMENTS``."""
    arguments = shlex.join(sys.argv[1:])
    if len(arguments) > _LONGEST_ARGUMENTS:
        return "SAME ARGUMENTS"
    return arguments


def rate(step_ms: float | None, batch_size: int | None) -> float | None:
    """Return the samples per second at a step time; None if either argument is not known, or the step took no time."""
    if not step_ms or batch_size is None:
        return None
    return 1000 * batch_size / step_ms


def _file_system(root: Path) -> str | None:
    try:
        kinds = file_system(".", root)
    except OSError:  # the working folder was deleted
        return None
    return ", ".join(filter(None, kinds)) or None


# --- the headline -------------------------------------------------------------------------------------------------

_OF_THE_STEP = {
    "compute": "limited by the model",
    "launch": "limited by Python, which issues the GPU's work more slowly than the GPU does it",
    "synchronisation": "limited by waits for the GPU, in which it gets no further work",
}
"""Cause -> words for the verdict, for the bottleneck ``compute``."""
_OF_THE_RUN = ("validation", "checkpoints")
"""Bottlenecks that lie outside the training steps."""


def headline(diagnosis: Diagnosis) -> str:
    """Return the verdict in a line; ``no verdict`` if too little was measured, ``cannot tell`` on a busy machine."""
    verdict, share = headline_parts(diagnosis)
    if not share:
        return verdict
    if verdict.startswith("OK"):
        return f"{verdict}. {share}."
    return f"{verdict}: {share}"


def headline_parts(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the verdict, and in words the share of time that supports it; the second is empty if there is no such
    share."""
    stats = diagnosis.stats
    facts = diagnosis.measurements.facts
    if facts.loader.repeated:
        workers = facts.loader.num_workers
        return f"every sample is trained {workers} times an epoch", f"the stream is not divided among {workers} workers"
    if diagnosis.bottleneck in _OF_THE_RUN:
        return f"limited by {diagnosis.bottleneck}", share_text(diagnosis.measurements)
    if diagnosis.bottleneck == "unknown" or stats.starved_pct is None:
        cannot_tell = facts.crowded and stats.starved_pct is not None
        return "cannot tell" if cannot_tell else "no verdict", ""
    toy = toy_sentence(stats.step_ms)
    if toy is not None:
        return toy.rstrip("."), ""
    waits = _waits(diagnosis, stats.starved_pct)
    if diagnosis.bottleneck == "data":
        return diagnosis.grade, waits
    return _of_the_other_parts(diagnosis, waits)


def _of_the_step_itself(diagnosis: Diagnosis) -> str:
    verdict = _OF_THE_STEP.get(diagnosis.cause, "limited by the step itself, not by data")
    if diagnosis.cause == "compute" and diagnosis.grade == "OK":
        return f"OK: {verdict}"
    return verdict


def _of_the_other_parts(diagnosis: Diagnosis, waits: str) -> tuple[str, str]:
    """Return the headline for a step that is not limited by data."""
    stats = diagnosis.stats
    if diagnosis.bottleneck == "compute":
        return _of_the_step_itself(diagnosis), waits
    verdict = f"{diagnosis.bottleneck}-bound"
    part_ms: float | None = diagnosis.measurements.between_ms
    where = "between the steps"
    if diagnosis.bottleneck == "copy":
        part_ms = stats.copy_ms
        where = "copying batches to the device"
        if diagnosis.device_type == "cpu":
            verdict = "limited by transfer hooks"
            where = "in hooks"
    part_pct = 100 * (part_ms or 0.0) / (stats.step_ms or 1.0)
    return verdict, f"{part_pct:.0f} % of each step {where}; {waits}"


def is_toy(diagnosis: Diagnosis) -> bool:
    """Return True for steps so short that Python takes most of them: there is no advice to give."""
    facts = diagnosis.measurements.facts
    judged = diagnosis.bottleneck not in (*_OF_THE_RUN, "unknown")
    is_faulty = facts.loader.repeated or facts.cut_short is not None  # a fault matters more than short steps
    return judged and not is_faulty and is_toy_step(diagnosis.stats.step_ms)


def should_try_workers(diagnosis: Diagnosis) -> bool:
    """Return True if waiting for batches that take time to make is the bottleneck, and more workers, which were not
    tried, may help."""
    return diagnosis.bottleneck == "data" and may_try_workers(diagnosis.measurements, diagnosis.cause)


def takes_turns(diagnosis: Diagnosis) -> bool:
    """Return True if the training process itself loads, and workers are no remedy and not to be tried. Loading and
    training then take turns, and neither is the bottleneck."""
    loads_itself = diagnosis.measurements.facts.loader.num_workers == 0
    workers_help = any(remedy.sets("num_workers") for remedy in diagnosis.remedies)
    may_help = workers_help or should_try_workers(diagnosis)
    return diagnosis.bottleneck == "data" and loads_itself and not may_help


def trust(diagnosis: Diagnosis) -> str:
    """Return the confidence in the verdict, in words: ``95 % CI 32-36, confidence high, 412 steps after 20 of
    warm-up``.

    The interval describes the waiting in this rank's steps. It is left out if the headline is about anything else: all
    ranks, the first batch of an epoch, validation, or checkpoints. It is also left out if it has no width.
    """
    text = f"confidence {diagnosis.confidence}, {plural(diagnosis.stats.steps, 'step')}"
    if diagnosis.stats.warm_up_steps:
        text += f" after {diagnosis.stats.warm_up_steps} of warm-up"
    low, high = diagnosis.stats.interval_pct or (0.0, 0.0)
    is_about_steps = _basis(diagnosis) == "steps" and diagnosis.bottleneck not in _OF_THE_RUN
    if not is_about_steps or diagnosis.measurements.facts.loader.repeated or f"{low:.0f}" == f"{high:.0f}":
        return text
    return f"95 % CI {low:.0f}-{high:.0f}, {text}"


def _waits(diagnosis: Diagnosis, starved_pct: float) -> str:
    """Return the share of time that training waits for data, in words."""
    measured = diagnosis.measurements
    basis = _basis(diagnosis)
    shares = shares_of(measured)
    loop = LOOP_WORDS[measured.facts.stage]
    share = f"{starved_pct:.0f} % of each step"
    if basis == "ranks" and measured.ranks is not None:
        return _waits_of_ranks(measured.ranks)
    if basis == "epochs" and shares is not None:
        share = f"{shares.epoch_pct:.0f} % of each epoch"
        if diagnosis.device_type == "cpu":
            return f"{loop} waits for data {share}, for its first batch"
        return f"GPU idle {share} waiting for its first batch"
    if diagnosis.bottleneck == "compute":
        return _waits_beside_compute(starved_pct, shares)
    if takes_turns(diagnosis):
        return f"loading takes {share}, and does not overlap with {loop}"
    if diagnosis.device_type == "cpu":
        return f"{loop} waits for data {share}"
    return f"GPU idle {share} waiting for data"


def _waits_beside_compute(starved_pct: float, shares: Shares | None) -> str:
    waits = f"{starved_pct:.0f} % of time waiting for data"
    if shares is None or not shares.compute_bound_confirmed:
        return waits
    return f"{waits}, which faster loading would not change: the model alone takes as long as a step"


def _waits_of_ranks(ranks: RankStats) -> str:
    slowest = "one of them" if ranks.slow_rank is None else f"rank {ranks.slow_rank}"
    return f"all ranks wait {ranks.starved_pct:.0f} % of each step for the data of {slowest}"


def _basis(diagnosis: Diagnosis) -> Literal["steps", "ranks", "epochs"]:
    """Return the waiting that decides the grade: in this rank's steps, in all ranks' steps, or for epochs' first
    batches."""
    ranks = diagnosis.measurements.ranks
    if diagnosis.cause == "one rank" and ranks is not None and ranks.starved_pct is not None:
        return "ranks"
    shares = shares_of(diagnosis.measurements)
    if shares is None or _steps_explain_the_grade(diagnosis):
        return "steps"
    if shares.epoch_pct == shares.data_pct:
        return "epochs"
    if shares.by_ranks and not shares.compute_bound_confirmed:
        return "ranks"
    return "steps"


def _steps_explain_the_grade(diagnosis: Diagnosis) -> bool:
    """Return True if the grade follows from the waiting in this rank's steps, or if nothing else is known."""
    starved_pct = diagnosis.stats.starved_pct
    if starved_pct is None:
        return True
    return diagnosis.cause != "epoch start" and grade_of(starved_pct) == diagnosis.grade


# --- without waiting ----------------------------------------------------------------------------------------------


def fastest(diagnosis: Diagnosis) -> str:
    """Return the speed-up that can be reached at most, in words; empty if not known."""
    factor = speedup(diagnosis)
    if factor is None:
        return ""
    best = best_speedup(diagnosis)
    if best is not None and best < factor:
        return f"at most {best:.2f} x as fast with what is advised below"
    starts = ", starts of epochs included" if _basis(diagnosis) == "epochs" else ""
    return f"if data were free: {factor:.2f} x as fast{starts}"


def best_speedup(diagnosis: Diagnosis) -> float | None:
    """Return the largest speed-up factor that the remedies can give together; None if none has a bound."""
    step_ms = diagnosis.stats.step_ms
    factors = []
    for remedy in diagnosis.remedies:
        if remedy.least_step_ms and step_ms:
            factors.append(step_ms / remedy.least_step_ms)
        elif remedy.most_gain_pct is not None and remedy.most_gain_pct < 100:
            factors.append(100 / (100 - remedy.most_gain_pct))
    if not factors:
        return None
    return math.prod(factors)


def speedup(diagnosis: Diagnosis) -> float | None:
    """Return the speed-up factor if training never waited for data, by the share in the headline; None if not known."""
    measured = diagnosis.measurements
    stats = measured.stats
    basis = _basis(diagnosis)
    if basis == "steps":
        return stats.speedup_if_free
    if basis == "ranks":
        whole = 100.0
        starved_pct = measured.ranks.starved_pct if measured.ranks is not None else None
        busy = 100.0 - (starved_pct or 0.0)
    else:
        batches = measured.facts.batches_per_epoch or 0
        step_ms = stats.step_ms or 0.0
        whole = 1e3 * (stats.epoch_start_s or 0.0) + batches * step_ms
        busy = batches * (step_ms - (stats.data_ms or 0.0))
    return ratio(whole, max(0.0, busy))


def start_ms_per_step(diagnosis: Diagnosis) -> float | None:
    """Return the share of a step in the start of its epoch, if the headline counts starts; else None."""
    batches = diagnosis.measurements.facts.batches_per_epoch
    start_s = diagnosis.stats.epoch_start_s
    if _basis(diagnosis) != "epochs" or not batches or start_s is None:
        return None
    return 1e3 * start_s / batches


def cause_text(diagnosis: Diagnosis) -> str:
    """Return the cause in a word or two; empty if not known, or if it is the same word as the bottleneck."""
    if diagnosis.cause in ("unknown", diagnosis.bottleneck):
        return ""
    return diagnosis.cause
