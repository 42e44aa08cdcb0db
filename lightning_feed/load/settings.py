"""How loaders are to be built: one frozen value, checked when it is made."""

import math
import multiprocessing
from dataclasses import dataclass
from typing import Any, Literal

from lightning_feed.errors import SettingsError

MOST = 1024
"""More workers, or more batches ahead, than any machine serves: a slip of the pen."""
SEEDS = 2**32
"""Seeds go up to here, as in NumPy and in Lightning."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of ``FastDataModule``'s loaders. ``"auto"`` is chosen for the machine, with a reason that is kept.

    Raises:
        SettingsError: for a value that is impossible, or that would have no effect beside the others.

    Example:
        >>> LoaderSettings(num_workers=4, prefetch_factor=2).pin_memory
        'auto'
    """

    num_workers: int | Literal["auto", "tune"] = "auto"
    """Workers of each loader; 0 loads in the training process, in its own thread. ``"tune"`` tries a few numbers when a
    fit begins, with what of the other settings is left to ``"auto"``, and remembers what it found."""
    workers: Literal["process", "thread"] = "process"
    """What the workers are. Threads start at once, share memory with training and send nothing through pipes, but only
    what releases the GIL runs beside it: decoders in C, reading files, torch. See docs/how-to/threads.md."""
    prefetch_factor: int | Literal["auto"] = "auto"
    """Batches that each worker loads ahead."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Whether batches lie in page-locked memory, from which a copy to the device can overlap with computing."""
    persistent_workers: bool | Literal["auto"] = "auto"
    """Whether workers live on from epoch to epoch."""
    background: int = 0
    """Batches that a thread of the training process keeps ready; 0 for no thread."""
    in_order: bool = True
    """Whether batches come in the order of the sampler. False lets a slow batch be overtaken; the order is then left to
    chance."""
    drop_last: bool = False
    """Whether a last training batch that is not full is left out. Evaluation always sees every sample."""
    shuffle: bool = True
    """Whether training samples are shuffled (map-style datasets). Evaluation never is."""
    timeout_s: float = 0
    """Seconds to wait for a batch from the workers before giving up; 0 waits for ever."""
    warn_after_s: float = 60
    """Seconds without a batch after which a warning says which worker hangs, and where; 0: never. The run goes on."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How worker processes start; None for Python's default."""
    seed: int | None = None
    """Seed of the training order; None takes ``seed_everything``'s, or draws one."""
    sample_bytes: int | None = None
    """Bytes of one sample as the dataset gives it, if known: the bound on shared memory is then exact."""

    def __post_init__(self) -> None:
        self._check_tune()
        for name, lowest in (("num_workers", 0), ("prefetch_factor", 1)):
            if getattr(self, name) not in ("auto", "tune"):
                self._check_whole(name, lowest, MOST, hint=' or "auto"')
        self._check_whole("background", 0, MOST)
        if self.seed is not None:
            self._check_whole("seed", 0, SEEDS - 1, hint=" or None")
        if self.sample_bytes is not None:
            self._check_whole("sample_bytes", 1, 2**50, hint=" or None")
        if self.workers not in ("process", "thread"):
            raise SettingsError(f'workers={self.workers!r} is not a choice. Give "process" or "thread".')
        for name in ("pin_memory", "persistent_workers", "in_order", "drop_last", "shuffle"):
            value = getattr(self, name)
            may_be_auto = name in ("pin_memory", "persistent_workers")
            if not isinstance(value, bool) and not (may_be_auto and value == "auto"):
                choices = 'True, False or "auto"' if may_be_auto else "True or False"
                raise SettingsError(f"{name}={value!r} is not a choice. Give {choices}.")
        self._check_seconds("timeout_s", "to wait for ever")
        self._check_seconds("warn_after_s", "to say nothing")
        methods = multiprocessing.get_all_start_methods()
        if self.start_method is not None and self.start_method not in methods:
            raise SettingsError(
                f"start_method={self.start_method!r} is not a way to start a process on this system. "
                f"Give one of {', '.join(map(repr, methods))}, or None for Python's default."
            )
        self._refuse_without_effect()

    def asking_for_workers(self) -> dict[str, Any]:
        """The settings given that mean something only where there are workers."""
        given = {
            "workers": (self.workers, self.workers != "process"),
            "prefetch_factor": (self.prefetch_factor, self.prefetch_factor != "auto"),
            "persistent_workers": (self.persistent_workers, self.persistent_workers is True),
            "in_order": (self.in_order, not self.in_order),
            "timeout_s": (self.timeout_s, self.timeout_s > 0),
            "start_method": (self.start_method, self.start_method is not None),
        }
        return {name: value for name, (value, is_given) in given.items() if is_given}

    def _refuse_without_effect(self) -> None:
        idle = self.asking_for_workers()
        if self.num_workers == 0 and idle:
            name, value = next(iter(idle.items()))
            raise SettingsError(
                f"num_workers=0 loads in the training process, so {name}={value!r} would have no effect. "
                f"Set num_workers to 1 or more, or leave {name} out."
            )
        if self.num_workers == 1 and not self.in_order:
            raise SettingsError(
                "num_workers=1 has nobody to overtake it, so in_order=False would have no effect. "
                "Set num_workers to 2 or more, or leave in_order out."
            )

        if self.workers == "thread" and self.start_method is not None:
            raise SettingsError(
                f"workers='thread' starts no processes, so start_method={self.start_method!r} would have no effect. "
                "Leave it out."
            )

    def _check_tune(self) -> None:
        for name, value in vars(self).items():
            if name != "num_workers" and isinstance(value, str) and value == "tune":
                raise SettingsError(
                    f'{name}="tune" is not a choice. Write num_workers="tune", which tries prefetch_factor, pin_memory '
                    "and persistent_workers too where they are left out."
                )

    def _check_whole(self, name: str, lowest: int, highest: int, hint: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise SettingsError(
                f"{name}={value!r} is not possible. Give a whole number from {lowest} to {highest}{hint}."
            )

    def _check_seconds(self, name: str, zero: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise SettingsError(f"{name}={value!r} is not possible. Give seconds, or 0 {zero}.")
