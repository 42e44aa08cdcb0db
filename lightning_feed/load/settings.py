"""LoaderSettings, as the user writes them; and Setting, the values of one loader without any ``"auto"``."""

import math
import multiprocessing
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_feed.errors import SettingsError, refuses_unknown_fields

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

MOST = 1024
"""Upper limit for workers and batches ahead. A larger number is taken for a typing error."""
SEEDS = 2**32
"""Number of possible seeds, from 0 on, as in NumPy and Lightning."""
TORCH_PREFETCH = 2
"""Batches that each worker loads ahead by default in torch."""
PINNING_DEVICES = ("cuda", "xpu")
"""Device types whose copies from page-locked memory can overlap with computing."""
REGISTERING_DEVICES = ("cuda",)
"""Device types whose driver page-locks slots, so that no thread has to pin batches in them."""


@dataclass(frozen=True)
class _Allowed:
    """The valid values of a setting."""

    words: tuple[object, ...] = ()
    numbers: range = range(0)

    def __contains__(self, value: object) -> bool:
        if type(value) is int and value in self.numbers:
            return True
        # Compares types too: 1 is not True.
        return any(type(value) is type(word) and value == word for word in self.words)

    def __str__(self) -> str:
        allowed = list(map(repr, self.words))
        if self.numbers:
            allowed.insert(0, f"a whole number from {self.numbers[0]} to {self.numbers[-1]}")
        return " or ".join(allowed)


_ALLOWED = {
    "num_workers": _Allowed(("auto", "tune"), range(MOST + 1)),
    "workers": _Allowed(("process", "thread", "ray")),
    "prefetch_factor": _Allowed(("auto",), range(1, MOST + 1)),
    "pin_memory": _Allowed((True, False, "auto")),
    "persistent_workers": _Allowed((True, False, "auto")),
    "hand_over": _Allowed(("slots", "torch")),
    "background": _Allowed((), range(MOST + 1)),
    "in_order": _Allowed((True, False)),
    "drop_last": _Allowed((True, False)),
    "start_method": _Allowed((*multiprocessing.get_all_start_methods(), None)),
    "seed": _Allowed((None,), range(SEEDS)),
}
"""The valid values of each setting, except for ``timeout_s``."""


@dataclass(frozen=True)
class RayCluster:
    """Value of a FeedLoader's ``workers`` that lets a Ray cluster make the batches."""

    address: str | None = None
    """Address of the cluster: ``"auto"`` for the cluster of this machine, or ``"host:port"`` of the head node. None for
    the cluster that this process uses already, or else a new one. LoaderSettings take the address from Ray's own
    environment variable, ``RAY_ADDRESS``."""


@refuses_unknown_fields
@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of ``FastDataModule``'s loaders. ``"auto"`` is replaced by a value for the machine, with a reason.

    Raises:
        SettingsError: a value is invalid, or would have no effect with the other settings.

    Example:
        >>> LoaderSettings(num_workers=4, prefetch_factor=2).pin_memory
        'auto'
    """

    num_workers: int | Literal["auto", "tune"] = "auto"
    """Workers of each loader; 0 loads in the training process. ``"auto"``: about one for each CPU of this rank, 1 for
    an iterable dataset, 0 if a rehearsal sees that samples would not stay the same. ``"tune"``: when a fit begins,
    tries a few numbers of workers, and a few values of other settings that are left to ``"auto"``, and remembers the
    result."""
    workers: Literal["process", "thread", "ray"] = "process"
    """Kind of workers. Threads start at once and share memory with training, but only code that releases the GIL runs
    in parallel: decoders in C, reading files, torch. ``"ray"``: tasks on the machines of a Ray cluster. See
    docs/how-to/tune.md."""
    prefetch_factor: int | Literal["auto"] = "auto"
    """Batches that each worker loads ahead."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Put batches into page-locked memory, so that the copy to the device can overlap with computing."""
    persistent_workers: bool | Literal["auto"] = "auto"
    """Keep the workers from epoch to epoch. Such workers make the first batches of the next epoch before it begins,
    unless the dataset may change in between."""
    hand_over: Literal["slots", "torch"] = "slots"
    """Way in which worker processes hand over their batches. ``"slots"``: in shared memory that is used again for later
    batches. ``"torch"``: as in a DataLoader, each tensor in new shared memory. See
    docs/how-to/batches_in_place.md."""
    background: int = 0
    """Batches that a thread of the training process keeps ready; 0 for no thread."""
    in_order: bool = True
    """Yield batches in sampler order. If False, a slow batch can be overtaken, so the order is not reproducible."""
    drop_last: bool = False
    """Drop an incomplete last training batch. Evaluation always sees every sample."""
    timeout_s: float = 0
    """Seconds to wait for a batch from the workers before an error is raised; 0 to wait for ever."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """Start method of worker processes; None for Python's default."""
    seed: int | None = None
    """Seed of the training order; None for the seed of ``seed_everything``, or a random seed if that was not called."""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                raise SettingsError(f"{name}={value!r} is not valid. Use {allowed}.")
        self._check_timeout()
        self._refuse_without_effect()
        if self.workers == "ray" and not isinstance(self.num_workers, int):
            raise SettingsError(
                f"workers='ray' with num_workers={self.num_workers!r}: the size of the cluster is not known here. Set "
                "the number of workers, one for each CPU that you want to use."
            )

    def asking_for_workers(self) -> dict[str, Any]:
        """Return the user's settings that need workers, by name."""
        without_workers: dict[str, tuple[object, ...]] = {
            "workers": ("process",),
            "prefetch_factor": ("auto",),
            "persistent_workers": ("auto", False),
            "in_order": (True,),
            "timeout_s": (0,),
            "start_method": (None,),
        }
        values = vars(self)
        return {name: values[name] for name, idle in without_workers.items() if values[name] not in idle}

    def _refuse_without_effect(self) -> None:
        asking = self.asking_for_workers()
        if self.num_workers == 0 and asking:
            name, value = next(iter(asking.items()))
            raise SettingsError(
                f"num_workers=0 loads in the training process, so {name}={value!r} would have no effect. "
                f"Set num_workers to 1 or more, or leave {name} out."
            )
        if self.num_workers == 1 and not self.in_order:
            raise SettingsError(
                "in_order=False needs at least two workers. Set num_workers to 2 or more, or leave in_order out."
            )
        if self.workers != "process" and self.start_method is not None:
            raise SettingsError(
                f"workers={self.workers!r} does not start torch's worker processes, so "
                f"start_method={self.start_method!r} would have no effect. Leave it out."
            )

    def _check_timeout(self) -> None:
        seconds: object = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise SettingsError(f"timeout_s={seconds!r} is not valid. Use seconds, or 0 to wait for ever.")


def workers_of(settings: LoaderSettings) -> Literal["process", "thread"] | RayCluster:
    """Return the ``workers`` argument for a FeedLoader."""
    if settings.workers == "ray":
        return RayCluster(os.environ.get("RAY_ADDRESS") or None)
    return settings.workers


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The values of one loader, without any ``"auto"``, as they are decided, tried, set and reported."""

    num_workers: int
    prefetch_factor: int | None = None
    """Batches that each worker loads ahead; None without workers."""
    pin_memory: bool = False
    persistent_workers: bool = False
    workers: Literal["process", "thread", "ray"] = "process"
    """Kind of the workers."""
    in_order: bool = True
    in_place: bool = False
    """True if worker processes leave their batches in slots. :func:`recommend` leaves it out."""

    @classmethod
    def of(cls, loader: "DataLoader[Any]") -> "Setting":
        """Read the present values of a loader."""
        from lightning_feed.load.slot_loaders import uses_slots  # here, because that module imports torch

        if not loader.num_workers:
            return cls(num_workers=0, pin_memory=loader.pin_memory)
        return cls(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            workers="thread" if getattr(loader, "workers", "process") == "thread" else "process",
            persistent_workers=loader.persistent_workers,
            pin_memory=loader.pin_memory,
            in_order=getattr(loader, "in_order", True),
            in_place=uses_slots(loader),
        )

    @property
    def batches_ahead(self) -> int:
        """Largest number of batches that the workers are making or keep ready."""
        return self.num_workers * (self.prefetch_factor or TORCH_PREFETCH)

    def __str__(self) -> str:
        text = f"num_workers={self.num_workers}"
        if self.workers != "process":
            text += f", workers={self.workers!r}"
        if self.prefetch_factor:
            text += f", prefetch_factor={self.prefetch_factor}"
        if self.in_place:
            text += ", in place"
        return text

    def with_workers(self, number: int, *, persistent: bool = False) -> "Setting":
        """Return this setting with another number of workers, and with options that fit it.

        Args:
            number: the number of workers.
            persistent: True to keep the workers from epoch to epoch, if there are any.
        """
        if number == 0:
            return Setting(num_workers=0, pin_memory=self.pin_memory)
        return replace(
            self,
            num_workers=number,
            prefetch_factor=self.prefetch_factor or TORCH_PREFETCH,
            persistent_workers=self.persistent_workers or persistent,
            in_order=self.in_order or number == 1,
        )
