"""One rank of each node tunes, and the others take what it found: through torch.distributed's store, not a collective.

Whoever writes first decides for all ranks of the node: the rank that tunes, with what it found or why it failed, or one
that has waited for too long, with the word that nobody tunes. So the ranks agree, whoever is slow, and nobody waits for
ever: not on a rank that raised, and not on one that is gone.
"""

import itertools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_feed.errors import LoaderError
from lightning_feed.load.tuning.values import Setting, Tuned

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between two looks into the store."""
LINGER_S = 5.0
"""A rank that failed waits at most so long for the others to hear of it: the store may go with its process."""
_TOO_LATE = "too late"
_WITHOUT = "Give LoaderSettings(num_workers=...) to train without tuning."
_TOLD = ("reason", "demand_per_s", "batch_size", "batches_per_s", "starved_pct", "remembered", "seconds")
"""Of what was found, besides the setting, that the other ranks get: not the trials."""

_sessions = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands among the ranks."""

    local_rank: int = 0
    local_ranks: int = 1
    """Of this node."""
    node: int = 0
    world_size: int = 1
    store: Any = None
    """torch's ``Store``, the same for all ranks; None where there is none."""


def place_of(trainer: Any) -> Place:
    """The place of this process in a Trainer's run."""
    if trainer.world_size < 2:
        return Place()
    return Place(
        local_rank=trainer.local_rank,
        local_ranks=trainer.num_devices,
        node=trainer.node_rank,
        world_size=trainer.world_size,
        store=_default_store(),
    )


def tune_once_per_node(
    tune: Callable[[], Tuned],
    place: Place,
    *,
    patience_s: float,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned | None:
    """What ``tune`` gives on local rank 0, on all ranks of its node.

    To be called as often on every rank: calls are counted, and those of a number belong together.

    Args:
        tune: called on local rank 0 only.
        place: of this process.
        patience_s: how long the others wait.
        sleep: seconds -> nothing.
        clock: seconds.

    Returns:
        What was found, without the trials on other ranks; None, on all ranks of the node, where it took too long, and
        where there is no store to tell each other.

    Raises:
        LoaderError: on the others, when ``tune`` raised. On local rank 0 its own error comes through.
    """
    if place.world_size < 2:
        return tune()
    number = next(_sessions)
    if place.store is None:
        logger.warning("The loaders are not tuned: torch.distributed has no store here by which ranks could agree.")
        return None
    key = f"lightning_feed/tuning/{number}/{place.node}"
    if place.local_rank:
        try:
            return _wait(place.store, key, patience_s, sleep, clock)
        except RuntimeError as error:
            if isinstance(error, LoaderError):
                raise
            raise LoaderError(
                f"The rank that tunes the loaders for this node is gone ({error}). Its own message says why. {_WITHOUT}"
            ) from error
    try:
        tuned = tune()
    except BaseException as error:
        _tell_of(error, place, key, sleep, clock)
        raise
    told = {name: getattr(tuned, name) for name in _TOLD}
    if _write(place.store, key, {"setting": asdict(tuned.setting), **told}) == {"gave_up": _TOO_LATE}:
        _warn(patience_s)
        return None
    return tuned


def _tell_of(
    error: BaseException,
    place: Place,
    key: str,
    sleep: Callable[[float], object],
    clock: Callable[[], float],
) -> None:
    """Tell the others of an error, and wait until they have heard of it."""
    until = clock() + LINGER_S
    try:
        _write(place.store, key, {"error": f"{type(error).__name__}: {error}"})
        while place.store.add(f"{key}/heard", 0) < place.local_ranks - 1 and clock() < until:
            sleep(LOOK_S)
    except RuntimeError as unheard:
        logger.info("The other ranks could not be told that tuning failed: %s", unheard)


def _wait(
    store: Any, key: str, patience_s: float, sleep: Callable[[float], object], clock: Callable[[], float]
) -> Tuned | None:
    until = clock() + patience_s
    while not store.check([key]) and clock() < until:
        sleep(LOOK_S)
    found = _write(store, key, {"gave_up": _TOO_LATE})  # what is there already stays
    store.add(f"{key}/heard", 1)
    if "gave_up" in found:
        _warn(patience_s)
        return None
    if "error" in found:
        raise LoaderError(
            f"The rank that tunes the loaders for this node failed: {found['error']} Its own message says more. "
            f"{_WITHOUT}"
        )
    setting = Setting(**found.pop("setting"))
    return Tuned(setting=setting, trials=(), **found)


def _write(store: Any, key: str, value: dict[str, Any]) -> dict[str, Any]:
    """Write where nothing is written yet; what is there now."""
    written: dict[str, Any] = json.loads(store.compare_set(key, "", json.dumps(value)))
    return written


def _warn(patience_s: float) -> None:
    logger.warning(
        "Tuning the loaders took longer than the %.0f s that ranks wait for it. All ranks of this node take what is "
        "recommended for the machine instead.",
        patience_s,
    )


def _default_store() -> Any:
    """The store at which the ranks met; None where there is none. Private in torch 2.6 to 2.15."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)
    return find() if find is not None else None
