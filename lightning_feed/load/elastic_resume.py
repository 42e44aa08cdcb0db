"""Elastic resume: the state of a loader, converted for a run with another number of ranks or batch size.

A state counts trained samples. A DistributedSampler assigns one common order to its ranks round-robin, so after ``k``
samples on each of ``n`` ranks, the first ``n * k`` of that order are trained. Torch's RandomSampler, SequentialSampler
and DistributedSampler can draw their order again from a state, so the remaining samples can be assigned to other ranks,
in batches of another size. Any other sampler can only be iterated again on the same ranks, which still allows another
batch size. Other changes raise a ResumeError.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_feed.errors import ResumeError
from lightning_feed.load.kinds import AnyDataset, AnySampler, Batch, Index, SavedState, State
from lightning_feed.load.order import MapPass, facts_of, rank_of_run, ranks_of_run

logger = logging.getLogger(__name__)

WAY_OUT = (
    "Resume with the configuration of the checkpoint until the end of this epoch. To change it, resume from a "
    "checkpoint that was saved at the end of an epoch (ModelCheckpoint(save_on_train_epoch_end=True))."
)
_SIDE_BY_SIDE = "Several loaders are trained side by side, and their positions cannot be converted separately"


def is_feed_state(state: object) -> bool:
    """Check for the state of a ``FeedLoader``, or such states gathered from all ranks."""
    return isinstance(state, Mapping) and not {"begun", "kind", "ranks"}.isdisjoint(state)


def begin_next_epoch(state: SavedState) -> State:
    """Return the state at the start of the epoch that follows the epoch of ``state``."""
    if "ranks" in state:
        return {"ranks": [begin_next_epoch(part) for part in state["ranks"]]}
    if state["kind"] == "iterable" or not state["begun"]:
        return {**state, "begun": False}
    if "next_start" not in state and _carries_state(state.get("pass_start", {})):
        raise ResumeError(
            "An earlier version of lightning_feed saved this checkpoint at the end of an epoch, without the state of "
            "the sampler or its generator, so the order of an earlier epoch would be repeated. Resume from a "
            "checkpoint that was saved in the middle of an epoch, or with that version."
        )
    epoch = None if state["epoch"] is None else state["epoch"] + 1
    start = state.get("next_start", {})
    state = {key: value for key, value in state.items() if key not in ("sample_seed", "rest", "next_start", "drawn")}
    return {**state, "epoch": epoch, "cycle": 0, "batches": 0, "pass_start": start, "done": [], "since": 0}


def _carries_state(starts: Mapping[str, State]) -> bool:
    return any("generator" in start or "sampler" in start for start in starts.values())


def state_of_rank(state: SavedState) -> State:
    """Return this rank's part of a state that may hold all ranks."""
    if "ranks" not in state:
        return dict(state)
    ranks: list[State] = state["ranks"]
    # A sampler is at the same place on all ranks; for a stream, another number of ranks is refused below.
    mine = ranks[rank_of_run()] if len(ranks) == ranks_of_run() else ranks[0]
    return {**mine, "beside": state.get("beside", 0), "world": len(ranks)}


def check_kind(state: SavedState, kind: str, dataset: AnyDataset) -> None:
    """Raise a ResumeError for a state of another kind of dataset."""
    if state["kind"] != kind:
        raise ResumeError(
            f"The loader state is for a dataset of kind {state['kind']!r}, but this loader's dataset "
            f"({type(dataset).__name__}) is of kind {kind!r}. Resume with the dataset of the interrupted run."
        )


def converted(state: State, loader: DataLoader[Batch], samplers: Mapping[str, AnySampler]) -> State:
    """Convert ``state`` for ``loader``, whose configuration may differ from the saved one.

    For a map-style dataset, the result's ``rest`` names the source of the remaining samples: "own" for the loader's own
    samplers, "dealt" for the checkpoint's order. ``batches`` is then set so that the loader's epoch has the right
    number of batches left. Without ``rest``, whole batches are skipped.

    Raises:
        ResumeError: the state cannot be converted.
    """
    if state["kind"] == "iterable":
        return _converted_stream(state, loader)
    state = _converted_map(state, loader, samplers)
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if hasattr(batches, "__len__") and state["batches"] > len(loader):
        raise ResumeError(
            f"The checkpoint was saved after {state['batches']} batches of an epoch, and this loader has "
            f"{len(loader)}. Resume with the dataset and batch size of the interrupted run."
        )
    return state


def _converted_stream(state: State, loader: DataLoader[Batch]) -> State:
    # One worker process and none at all see the same share of the dataset.
    if max(1, state["num_workers"]) != max(1, loader.num_workers):
        raise ResumeError(
            f"The checkpoint was saved with num_workers={state['num_workers']} and this loader has "
            f"num_workers={loader.num_workers}. An iterable dataset is divided among its workers, so their positions "
            f"cannot be converted. Set num_workers={state['num_workers']} to resume."
        )
    ranks = state.get("world")
    now = ranks_of_run()
    if ranks not in (None, now):
        raise ResumeError(
            f"The checkpoint was saved by {ranks} ranks and this run has {now}. An iterable dataset is divided among "
            f"the ranks, so their positions cannot be converted. Resume with {ranks} ranks."
        )
    before = state.get("batch_size", loader.batch_size)
    size = loader.batch_size
    if before == size:
        return state
    what = f"The checkpoint was saved with batch_size={before}, and this loader has {size}."
    if state.get("beside"):
        raise ResumeError(f"{what} {_SIDE_BY_SIDE}. Resume with batch_size={before}.")
    logger.warning("%s The epoch continues after the trained samples.", what)
    # Positions are counted in samples, so only the number of batches changes.
    try:
        drawn = sum(worker["drawn"] for worker in state["workers"].values())
        left = max(0, len(loader.dataset) - drawn) / (size or 1)  # type: ignore[arg-type]
        base = len(loader) - (math.floor(left) if loader.drop_last else math.ceil(left))
    except (TypeError, NotImplementedError):  # no length to compare with
        base = state["batches"]
    return {**state, "batch_size": size, "batches": base}


def _converted_map(state: State, loader: DataLoader[Batch], samplers: Mapping[str, AnySampler]) -> State:
    new = facts_of(loader, samplers)
    old = {name: state[name] for name in new}
    parts = trained_parts(state)
    same_samplers = old["order"] == new["order"] and set(state["pass_start"]) == set(samplers)
    if not parts:  # nothing could be repeated
        kept = state["pass_start"] if same_samplers else {}
        return {**state, **new, "pass_start": kept, "batches": 0, "since": 0, "done": []}
    changed = _changes(old, new)
    if not same_samplers and not changed and "rest" not in state:
        changed = [_other_sampler(state["pass_start"], samplers)]
    if not changed and state["since"] == 0 and not state["done"]:
        return state
    rest = _way_of_rest(old, new, parts, same_samplers=same_samplers)
    what = " and ".join(changed) or "the changes of an earlier resume"
    why = _why_refused(state, loader, other_length=old["samples"] != new["samples"], convertible=rest is not None)
    if why:
        raise ResumeError(
            f"The checkpoint was saved in the middle of an epoch, and this run has {what}. {why}, so some samples "
            f"would be repeated and others missed. {WAY_OUT}"
        )
    state = {**state, **new, "order": old["order"], "done": parts, "rest": rest}
    base, left = _left(state, loader)
    if changed:
        logger.warning(
            "The checkpoint was saved in the middle of an epoch, and this run has %s. The epoch continues after the "
            "trained samples%s.",
            what,
            left,
        )
    return {**state, "batches": base, "since": base}


def _way_of_rest(old: SavedState, new: SavedState, parts: list[list[int]], *, same_samplers: bool) -> str | None:
    """Return the source of the remaining samples, see :func:`converted`. None if there is no source."""
    if all(one["order"] is not None and one["world"] in (1, one["shares"]) for one in (old, new)):
        return "dealt"
    same_shares = old["world"] == new["world"] and all(shares == new["shares"] for shares, _ in parts)
    return "own" if same_samplers and same_shares else None


def _other_sampler(saved: Iterable[str], samplers: Iterable[str]) -> str:
    were, are = (", ".join(name.removesuffix("#0") for name in names) for names in (saved, samplers))
    return f"the sampler {are} instead of {were}" if were != are else f"other settings for the sampler {are}"


def _why_refused(state: SavedState, loader: DataLoader[Batch], *, other_length: bool, convertible: bool) -> str:
    """Return the reason why this loader cannot train the rest of the epoch. Empty if it can."""
    if other_length:
        return "The order of the epoch was drawn for the dataset's old length, and this length gives another order"
    if state.get("beside"):
        return _SIDE_BY_SIDE
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return f"The batches that {type(loader.batch_sampler).__name__} would make now cannot be predicted"
    if not convertible:
        return (
            "The order of the samples is known only for torch's own samplers, and only if a DistributedSampler divides "
            f"them among all ranks; this loader's is {type(_batching(loader)[0]).__name__}"
        )
    return ""


def rest_of(state: SavedState, loader: DataLoader[Batch], position: MapPass) -> Callable[[], Iterator[Index]] | None:
    """Return a function for the remaining indices of the epoch, to be called after the samplers are seeded. None if
    whole batches are skipped."""
    if "rest" not in state:
        return None

    def indices() -> Iterator[Index]:
        sampler, size, drop_last = _batching(loader)
        if state["rest"] == "dealt":
            share: Any = _share_of_rest(state, sampler)
        else:
            had = sum(samples for _, samples in state["done"])
            share = position.skip_trained(iter(sampler), had)
        yield from share if loader.batch_sampler is None else BatchSampler(share, size, drop_last)

    return indices


def trained_parts(state: SavedState) -> list[list[int]]:
    """Return the trained parts of the epoch, one per configuration: [shares, samples per share]."""
    shares = state["shares"]
    samples = (state["batches"] - state["since"]) * (state["batch_size"] or 1)
    if state["order"] is not None:  # the last batch may have been smaller
        left = max(0, state["samples"] - samples_of_all(state))
        samples = min(samples, math.ceil(left / shares))
    parts = [*state["done"], [shares, samples]]
    return [part for part in parts if part[1]]


def samples_of_all(state: SavedState) -> int:
    """Count the samples of the epoch, over all ranks, trained before the last configuration change."""
    return sum(shares * samples for shares, samples in state["done"])


def _changes(old: SavedState, new: SavedState) -> list[str]:
    """Describe the configuration changes."""
    words = {
        "samples": "a dataset of {} samples instead of {}",
        "ranks": "{} ranks instead of {}",
        "batch_size": "batch_size={} instead of {}",
    }
    before, now = ({**one, "ranks": max(one["world"], one["shares"])} for one in (old, new))
    return [text.format(now[name], before[name]) for name, text in words.items() if now[name] != before[name]]


def _order(state: SavedState, sampler: AnySampler) -> list[int]:
    """Draw the whole order of the interrupted epoch, before its division among ranks.

    Draws from the user's generator in ``sampler``, if any, since later epochs continue from its state.
    """
    order = state["order"]
    everything = range(state["samples"])
    start = state["pass_start"][order["sampler"]]
    if "shuffle" in order:
        whole: DistributedSampler[int] = DistributedSampler(
            everything,  # type: ignore[arg-type]  # only its length is used
            num_replicas=1,
            rank=0,
            shuffle=order["shuffle"],
            seed=order["seed"],
        )
        whole.set_epoch(start["epoch"])
        return list(whole)
    generator = torch.Generator()
    if "seed" in start:
        generator.manual_seed(start["seed"])
    elif "generator" in start:
        if type(getattr(sampler, "generator", None)) is torch.Generator:
            generator = sampler.generator
        generator.set_state(start["generator"])
    else:
        return list(everything)
    return list(RandomSampler(everything, generator=generator))


def _share_of_rest(state: SavedState, sampler: AnySampler) -> list[int]:
    """Return this rank's share of the remaining samples."""
    left = _order(state, sampler)[samples_of_all(state) :]
    if not isinstance(sampler, DistributedSampler):
        return left
    lacking = -len(left) % sampler.num_replicas
    if sampler.drop_last:
        left = left[: len(left) - len(left) % sampler.num_replicas]
    elif left and lacking:  # as DistributedSampler does, so that all ranks have the same number
        left += (left * lacking)[:lacking]
    return left[sampler.rank :: sampler.num_replicas]


def _batching(loader: DataLoader[Batch]) -> tuple[AnySampler, int, bool]:
    batches: Any = loader.batch_sampler
    return (loader.sampler, 1, False) if batches is None else (batches.sampler, batches.batch_size, batches.drop_last)


def _left(state: SavedState, loader: DataLoader[Batch]) -> tuple[int, str]:
    """Return the number of the batch with which this rank's remaining samples begin, and a description of these."""
    sampler, size, drop_last = _batching(loader)
    twice = 0
    if state["rest"] == "own":
        had = sum(samples for _, samples in state["done"])
        if not hasattr(sampler, "__len__"):
            return had // size, ""
        left = max(0, len(sampler) - had)
    else:
        whole = max(0, state["samples"] - samples_of_all(state))
        shares = state["shares"]
        left = whole // shares if getattr(sampler, "drop_last", False) else -(-whole // shares)
        twice = max(0, left * shares - whole)
    batches = left // size if drop_last else -(-left // size)
    if left and not batches:
        raise ResumeError(
            f"The checkpoint's epoch has {left} samples left for each rank, too few for a batch of {size} with "
            f"drop_last=True. Resume with batch_size={left} or less. {WAY_OUT}"
        )
    repeated = f"; {twice} are trained twice, since all ranks need the same number" if twice else ""
    return len(loader) - batches, f": {left} are left for each rank{repeated}"
