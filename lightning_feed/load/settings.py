"""LoaderSettings: how loaders are to be built, one frozen value that is checked when it is made."""

import math
import multiprocessing
from dataclasses import dataclass
from typing import Any, Literal

from lightning_feed.errors import SettingsError

MOST = 1024
"""More workers, or more batches ahead, than any machine serves: a typing error."""
SEEDS = 2**32
"""Seeds go up to here, as in NumPy and in Lightning."""
_NUMBERS: dict[str, tuple[int, int, tuple[str | None, ...]]] = {
    "num_workers": (0, MOST, ("auto", "tune")),
    "prefetch_factor": (1, MOST, ("auto",)),
    "background": (0, MOST, ()),
    "seed": (0, SEEDS - 1, (None,)),
    "sample_bytes": (1, 2**50, (None,)),
}
"""Lowest and highest value, and what may be given in place of a number."""
_CHOICES: dict[str, tuple[object, ...]] = {
    "workers": ("process", "thread"),
    "pin_memory": (True, False, "auto"),
    "persistent_workers": (True, False, "auto"),
    "in_order": (True, False),
    "drop_last": (True, False),
    "shuffle": (True, False),
}


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
        for name, (lowest, highest, words) in _NUMBERS.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest
            if not whole and not _is_one_of(value, words):
                others = f" or {words[0]!r}" if words else ""
                raise SettingsError(
                    f"{name}={value!r} is not possible. Give a whole number from {lowest} to {highest}{others}."
                )
        methods = (*multiprocessing.get_all_start_methods(), None)
        for name, choices in {**_CHOICES, "start_method": methods}.items():
            value = getattr(self, name)
            if not _is_one_of(value, choices):
                raise SettingsError(f"{name}={value!r} is not a choice. Give one of {', '.join(map(repr, choices))}.")
        for name, zero in (("timeout_s", "to wait for ever"), ("warn_after_s", "to say nothing")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise SettingsError(f"{name}={value!r} is not possible. Give seconds, or 0 {zero}.")
        self._refuse_without_effect()

    def asking_for_workers(self) -> dict[str, Any]:
        """The settings given that mean something only where there are workers."""
        idle: dict[str, tuple[object, ...]] = {
            "workers": ("process",),
            "prefetch_factor": ("auto",),
            "persistent_workers": ("auto", False),
            "in_order": (True,),
            "timeout_s": (0,),
            "start_method": (None,),
        }
        return {name: getattr(self, name) for name, values in idle.items() if getattr(self, name) not in values}

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


def _is_one_of(value: object, choices: tuple[object, ...]) -> bool:
    """Whether it is one of them by type, too: 1 is not True."""
    return any(type(value) is type(choice) and value == choice for choice in choices)
