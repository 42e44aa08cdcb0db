"""The rest of an interrupted epoch, for a run with other ranks, another batch size or another sampler.

What was trained is counted in samples. A DistributedSampler deals one common order out to its ranks, card by card, so
``k`` samples on each of ``n`` ranks are the first ``n * k`` of that order, and what follows them is left. Torch's
RandomSampler, SequentialSampler and DistributedSampler give an order that can be drawn again from what a state holds,
so what is left of it can be dealt out to other ranks, in batches of another size. Any other sampler can only be
iterated again by the ranks that had it, which is enough for another batch size. All else is a ResumeError.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_feed.errors import ResumeError

logger = logging.getLogger(__name__)

_WAY_OUT = (
    "Resume with what the checkpoint was trained with until the end of this epoch, or from a checkpoint that was saved "
    "at the end of an epoch (ModelCheckpoint(save_on_train_epoch_end=True)): there it may change."
)

SIDE_BY_SIDE = "Several loaders are trained side by side, whose places cannot be carried over one by one"


def ranks_of_run() -> int:
    """Training processes of this run."""
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if started else 1


def facts_of(loader: DataLoader[Any], samplers: Mapping[str, Any]) -> dict[str, Any]:
    """What a state of a map-style loader says of its setting, to be compared when a run is resumed from it.

    Returns:
        ``world``, the ranks of the run; ``shares`` that the sampler deals out; ``batch_size``; ``samples`` of the
        dataset, None where it has no length; and ``order``, how to draw it again, None where that is not known.
    """
    batches = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", batches)
    try:
        samples = len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        samples = None
    name = next((name for name, found in samplers.items() if found is sampler), "")
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    if type(batches) is not BatchSampler and hasattr(batches, "state_dict"):
        size = None  # it may change from batch to batch, and its state knows
    return {
        "world": ranks_of_run(),
        "shares": sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1,
        "batch_size": size if isinstance(size, int) else None,
        "samples": samples,
        "order": _describe(name, sampler, loader, samples),
    }


def fitted(state: dict[str, Any], loader: DataLoader[Any], samplers: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` as it is for ``loader``, whose setting may be another than that of the loader that wrote it.

    ``rest`` in it says how the rest of the epoch is to be had: "own", from the loader's own samplers, or "dealt", from
    the order of the checkpoint; it is left out where whole batches are to be skipped. ``batches`` is then the number
    that leaves as many batches of this loader's epoch as are left in truth.

    Raises:
        ResumeError: what changed cannot be carried over.
    """
    if "shares" not in state:
        return state  # written before states held these facts
    new = facts_of(loader, samplers)
    old = {name: state[name] for name in new}
    parts = _trained(state)
    same_samplers = old["order"] == new["order"] and set(state["pass_start"]) == set(samplers)
    if not parts:  # nothing that could be repeated
        kept = state["pass_start"] if same_samplers else {}
        return {**state, **new, "pass_start": kept, "batches": 0, "since": 0, "done": []}
    changed = _changes(old, new)
    if not same_samplers and not changed and "rest" not in state:
        changed = [_other_sampler(state["pass_start"], samplers)]
    what = " and ".join(changed) or "the changes that it was resumed with before"
    whole = state["since"] == 0 and not state["done"]
    if not changed and whole:
        return state
    _refuse(state, old, new, what, loader)
    own = same_samplers and old["world"] == new["world"] and all(shares == new["shares"] for shares, _ in parts)
    if not own and (old["order"] is None or new["order"] is None or not _is_dealt(old) or not _is_dealt(new)):
        raise ResumeError(
            f"The checkpoint was saved in the middle of an epoch, and this run has {what}. The order of the samples "
            "is then known for torch's own samplers only, and where a DistributedSampler divides them among all ranks; "
            f"this loader's is {_sampler_name(loader)}. {_WAY_OUT}"
        )
    state = {**state, **new, "order": old["order"], "done": parts, "rest": "own" if own else "dealt"}
    left, base, twice = _left(state, loader)
    state |= {"batches": base, "since": base}
    if changed:
        logger.warning(
            "The checkpoint was saved in the middle of an epoch, and this run has %s. The epoch goes on after the "
            "samples that were trained%s%s.",
            what,
            "" if left is None else f": {left} are left for each rank",
            f"; {twice} are trained twice, since all ranks need as many" if twice else "",
        )
    return state


def rest_of(state: Mapping[str, Any], loader: DataLoader[Any]) -> Callable[[], Iterator[Any]] | None:
    """What gives the indices of the rest of the epoch; None where whole batches of the loader's own are to be skipped.
    To be called when the samplers have been seeded."""
    if "rest" not in state:
        return None

    def indices() -> Iterator[Any]:
        sampler, size, drop_last = _batching(loader)
        share = islice(sampler, _own(state["done"]), None) if state["rest"] == "own" else _dealt(state, sampler)
        if loader.batch_sampler is None:
            yield from share
        else:
            yield from BatchSampler(share, size, drop_last)

    return indices


def _trained(state: Mapping[str, Any]) -> list[list[int]]:
    """What was trained of the epoch, part by part: [shares, samples of each share]."""
    size = state["batch_size"] or 1
    parts = [*state["done"], [state["shares"], (state["batches"] - state["since"]) * size]]
    return [part for part in parts if part[1]]


def _own(parts: Sequence[Sequence[int]]) -> int:
    return sum(samples for _, samples in parts)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is not as it was, in words."""
    changed = []
    if None not in (old["samples"], new["samples"]) and old["samples"] != new["samples"]:
        changed.append(f"a dataset of {new['samples']} samples in place of {old['samples']}")
    before, now = max(old["world"], old["shares"]), max(new["world"], new["shares"])
    if before != now:
        changed.append(f"{now} ranks in place of {before}")
    elif old["shares"] != new["shares"]:
        changed.append(f"a sampler that deals out {new['shares']} shares in place of {old['shares']}")
    if old["batch_size"] != new["batch_size"]:
        changed.append(f"batch_size={new['batch_size']} in place of {old['batch_size']}")
    return changed


def _other_sampler(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    were, are = (", ".join(name.removesuffix("#0") for name in names) or "none" for names in (old, new))
    return f"the sampler {are} in place of {were}" if were != are else f"other settings of the sampler {are}"


def _refuse(
    state: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], what: str, loader: DataLoader[Any]
) -> None:
    why = ""
    if None not in (old["samples"], new["samples"]) and old["samples"] != new["samples"]:
        why = "The order of the epoch was drawn for the dataset as it was, and is another one for this length"
    elif state.get("beside"):
        why = SIDE_BY_SIDE
    elif loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        why = f"Which samples {type(loader.batch_sampler).__name__} would put into its batches now cannot be told"
    elif getattr(loader.dataset, "shard", None) is not None:
        why = "Each rank keeps its share of the samples on its device (cache_shard=True), and has trained of that alone"
    if why:
        raise ResumeError(
            f"The checkpoint was saved in the middle of an epoch, and this run has {what}. {why}, so some samples "
            f"would be repeated and others missed. {_WAY_OUT}"
        )


def _is_dealt(facts: Mapping[str, Any]) -> bool:
    """Whether the sampler divides the samples among all ranks of the run."""
    return bool(facts["world"] in (1, facts["shares"]))


def _describe(name: str, sampler: Any, loader: DataLoader[Any], samples: int | None) -> dict[str, Any] | None:
    kind = type(sampler)
    if kind not in (DistributedSampler, RandomSampler, SequentialSampler):
        return None
    drawn_from = sampler.dataset if kind is DistributedSampler else sampler.data_source
    if getattr(loader.dataset, "shard", None) is not None or len(drawn_from) != samples:
        return None
    if kind is DistributedSampler:
        return {"sampler": name, "shuffle": sampler.shuffle, "seed": sampler.seed}
    if kind is RandomSampler and (
        sampler.replacement
        or sampler.num_samples != samples
        or (sampler.generator is not None and sampler.generator.device.type != "cpu")
    ):
        return None
    return {"sampler": name}


def _order(state: Mapping[str, Any]) -> list[int]:
    """The whole order of the epoch that ``state`` interrupted, before it was divided among ranks."""
    order, everything = state["order"], range(state["samples"])
    start = state["pass_start"][order["sampler"]]
    if "shuffle" in order:
        whole: DistributedSampler[int] = DistributedSampler(
            everything,  # type: ignore[arg-type]  # has a length, which is all that is asked of it
            num_replicas=1,
            rank=0,
            shuffle=order["shuffle"],
            seed=order["seed"],
        )
        whole.set_epoch(start["epoch"])
        return list(whole)
    if not ("seed" in start or "generator" in start):
        return list(everything)
    generator = torch.Generator()
    if "seed" in start:
        generator.manual_seed(start["seed"])
    else:
        generator.set_state(start["generator"])
    return list(RandomSampler(everything, generator=generator))


def _dealt(state: Mapping[str, Any], sampler: Any) -> list[int]:
    """This rank's share of what is left."""
    left = _order(state)[sum(shares * samples for shares, samples in state["done"]) :]
    if not isinstance(sampler, DistributedSampler):
        return left
    lacking = -len(left) % sampler.num_replicas
    if sampler.drop_last:
        left = left[: len(left) - len(left) % sampler.num_replicas]
    elif left and lacking:  # as DistributedSampler does, whose ranks all have as many
        left += (left * lacking)[:lacking]
    return left[sampler.rank :: sampler.num_replicas]


def _batching(loader: DataLoader[Any]) -> tuple[Any, int, bool]:
    batches: Any = loader.batch_sampler
    return (loader.sampler, 1, False) if batches is None else (batches.sampler, batches.batch_size, batches.drop_last)


def _left(state: Mapping[str, Any], loader: DataLoader[Any]) -> tuple[int | None, int, int]:
    """Samples that are left for this rank, None: not known; the batches that come before them in its count; and samples
    that are repeated."""
    sampler, size, drop_last = _batching(loader)
    trained, shares, twice = state["done"], state["shares"], 0
    if state["rest"] == "own":
        had = _own(trained)
        if not hasattr(sampler, "__len__"):
            return None, had // size, 0
        left = max(0, len(sampler) - had)
    else:
        whole = max(0, state["samples"] - sum(ranks * samples for ranks, samples in trained))
        left = whole // shares if getattr(sampler, "drop_last", False) else -(-whole // shares)
        twice = max(0, left * shares - whole)
    batches = left // size if drop_last else -(-left // size)
    if left and not batches:
        raise ResumeError(
            f"{left} samples of the epoch that the checkpoint was saved in are left for each rank, of which "
            f"drop_last=True makes no batch of {size}. Resume with batch_size={left} or less. {_WAY_OUT}"
        )
    return left, len(loader) - batches, twice


def _sampler_name(loader: DataLoader[Any]) -> str:
    return type(_batching(loader)[0]).__name__
