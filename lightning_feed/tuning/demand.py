"""What is tuned, and how many batches per second its model can take. Everything is put back as it was."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from lightning_feed.diagnosing.data import request_loaders
from lightning_feed.diagnosing.failure import told
from lightning_feed.diagnosing.fits import Bench
from lightning_feed.diagnosing.globals import ProcessState
from lightning_feed.diagnosing.replay import own_loaders
from lightning_feed.diagnosing.snapshot import Snapshot
from lightning_feed.diagnosing.trainer import Limits, Package, check_trainer, package_of, quiet
from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import Changes, with_changes
from lightning_feed.load.worker_end import end_pass
from lightning_feed.watch.experiments.session import parts_of

ARRAYS_KEPT = 64 * 2**20
"""Bytes. Larger arrays of a data module are taken to be read only."""
REPLAY_STEPS, FEWEST_STEPS, REPLAY_S = 300, 12, 5.0


@contextmanager
def bench_of(target: Any, model: Any, trainer: Any, name: str | None = None) -> Iterator[tuple[Bench, DataLoader[Any]]]:
    """The training loader of a target, with what is needed to train on it. Afterwards all is as it was before.

    Args:
        target: a data module, which is prepared and set up, or loaders; or ``model``, which has its own.
        model: the module, or None.
        trainer: the user's; None: one that Lightning chooses a device for.
        name: the place of the loader among several, as messages name it.

    Raises:
        SettingsError: for a target of another kind, one that has several training loaders or none that is a DataLoader,
            and for a Trainer that cannot be used.
        FeedError: the data module fails when it is set up.
    """
    has_loaders = hasattr(target, "train_dataloader")
    if not has_loaders:
        try:
            parts_of(target)
        except LoaderError as error:
            raise SettingsError(
                f"A {type(target).__name__} cannot be tuned: {error}. Give a LightningDataModule, or torch DataLoaders."
            ) from error
    plain = getattr(model, "_orig_mod", model)
    known = next((one for one in (trainer, plain, target if has_loaders else None) if one is not None), None)
    package = Package("lightning.pytorch") if known is None else package_of(known)
    process = ProcessState()
    kept: list[Any] = [process]
    try:
        with quiet():
            if trainer is None:
                used = package.root.Trainer(
                    logger=False, enable_checkpointing=False, devices=1, enable_progress_bar=False
                )
            else:
                check_trainer(trainer)
                used = trainer
            if used.strategy.root_device.type == "cuda":
                process.keep_cuda()
            datamodule = target if has_loaders and target is not model else None
            loaders = None if has_loaders else target
            compiled = model if plain is not model else None
            leave = [one for one in (trainer, used) if one is not None]
            kept.append(Snapshot(plain, compiled, leave=(*leave, datamodule, loaders)))
            kept.append(Snapshot(datamodule, loaders, leave=(*leave, plain), array_limit=ARRAYS_KEPT))
            bench = Bench(package, used, plain, datamodule, loaders, compiled)
            with told("the data module could not be set up"):
                request_loaders(bench)
            yield bench, _named_loader(bench, name)
    finally:
        _put_back(kept)


def measure_demand(bench: Bench) -> float:
    """Batches per second of a fit in which each step gets the same batch, its way to the device included.

    The batch comes from the host, as from a loader that costs nothing: where the run has PrefetchCallback the copy
    overlaps with computing, and where not it is part of what the model needs for a batch.

    Raises:
        FeedError: the fit fails, or is too slow to be measured.
    """
    with told("a batch could not be loaded"), untouched(bench.train_loaders):
        batch = _first_batch(bench)
    if batch is None:
        raise LoaderError("The training loader gives no batch. Check the length of the data set, and drop_last.")
    accumulate = bench.trainer.accumulate_grad_batches
    limits = Limits(least=FEWEST_STEPS * accumulate, most=REPLAY_STEPS * accumulate, seconds=REPLAY_S)
    with told("training on one batch again and again failed"):
        per_s = bench.replay([batch], limits, _silent, on_device=False)
    if per_s is None:
        raise LoaderError(
            "Training on one batch again and again was too slow to tell what the model can take. Give demand_per_s="
            "..., in batches per second, or leave the model out to look for the fastest setting."
        )
    return per_s


def _first_batch(bench: Bench) -> Any:
    """As the loop gets it, made in this process: of several loaders a batch of each. None: there is none."""
    mine = own_loaders(bench.train_loaders, lambda loader: with_changes(loader, Changes(num_workers=0)))
    if isinstance(mine, DataLoader):
        batches = iter(mine)
        try:
            return next(batches, None)
        finally:
            end_pass(batches)
    combined = bench.package.root.utilities.CombinedLoader
    whole = mine if isinstance(mine, combined) else combined(mine, "max_size_cycle")  # as a fit would
    batch, _, _ = next(iter(whole), (None, 0, 0))
    return batch


def _named_loader(bench: Bench, name: str | None) -> DataLoader[Any]:
    try:
        parts = {part.name: part.loader for part in parts_of(bench.train_loaders)}
    except LoaderError as error:
        raise SettingsError(f"The training loader cannot be tuned: {error}.") from error
    if name is None and len(parts) == 1:
        return next(iter(parts.values()))
    if name in parts:
        return parts[name]
    first = next(iter(parts))
    if len(parts) == 1:
        raise SettingsError(f"loader={name!r}: there is one training loader only. Leave the name out.")
    what = "Tune them one by one" if name is None else f"None is named {name!r}"
    raise SettingsError(
        f"There are {len(parts)} training loaders: {', '.join(parts)}. {what}: --loader {first} on the command line, "
        f"loader={first!r} in a call of tune()."
    )


def _put_back(kept: list[Any]) -> None:
    """Everything as it was, whatever Ctrl-C does meanwhile; the process last, which has the handler of Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in reversed(kept):
        one.restore()


def _silent(done: int, most: int) -> None:
    """Nobody asked for the steps of a replay."""
