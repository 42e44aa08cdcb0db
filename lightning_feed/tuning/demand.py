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
from lightning_feed.diagnosing.snapshot import Snapshot
from lightning_feed.diagnosing.trainer import Limits, Package, check_trainer, package_of, quiet
from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import Changes, with_changes
from lightning_feed.load.worker_end import end_pass
from lightning_feed.watch.experiments.subject import parts_of

ARRAYS_KEPT = 64 * 2**20
"""Bytes. Larger arrays of a data module are taken to be read only."""
REPLAY_STEPS, FEWEST_STEPS, REPLAY_S = 300, 12, 5.0


@contextmanager
def bench_of(target: Any, model: Any, trainer: Any) -> Iterator[tuple[Bench, DataLoader[Any]]]:
    """The training loader of a target, with what is needed to train on it. Afterwards all is as it was before.

    Args:
        target: a data module, which is prepared and set up, or a DataLoader.
        model: the module, or None.
        trainer: the user's; None: one that Lightning chooses a device for.

    Raises:
        SettingsError: for a target of another kind, one that has several training loaders or none that is a DataLoader,
            and for a Trainer that cannot be used.
        FeedError: the data module fails when it is set up.
    """
    is_loader = isinstance(target, DataLoader)
    if not is_loader and not hasattr(target, "train_dataloader"):
        raise SettingsError(
            f"A {type(target).__name__} cannot be tuned. Give a LightningDataModule, or a torch DataLoader."
        )
    plain = getattr(model, "_orig_mod", model)
    known = next((one for one in (trainer, plain, None if is_loader else target) if one is not None), None)
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
            datamodule, loaders = (None, target) if is_loader else (target, None)
            compiled = model if plain is not model else None
            leave = [one for one in (trainer, used) if one is not None]
            kept.append(Snapshot(plain, compiled, leave=(*leave, target)))
            kept.append(Snapshot(target, leave=(*leave, plain), array_limit=ARRAYS_KEPT))
            bench = Bench(package, used, plain, datamodule, loaders, compiled)
            with told("the data module could not be set up"):
                request_loaders(bench)
            yield bench, _only_loader(bench)
    finally:
        _put_back(kept)


def measure_demand(bench: Bench, loader: DataLoader[Any]) -> float:
    """Batches per second of a fit in which each step gets the same batch, its way to the device included.

    The batch comes from the host, as from a loader that costs nothing: where the run has PrefetchCallback the copy
    overlaps with computing, and where not it is part of what the model needs for a batch.

    Raises:
        FeedError: the fit fails, or is too slow to be measured.
    """
    with told("a batch could not be loaded"), untouched(loader):
        batches = iter(with_changes(loader, Changes(num_workers=0)))
        try:
            batch = next(batches, None)
        finally:
            end_pass(batches)
    if batch is None:
        raise LoaderError("The training loader gives no batch. Check the length of the data set, and drop_last.")
    accumulate = bench.trainer.accumulate_grad_batches
    limits = Limits(least=FEWEST_STEPS * accumulate, most=REPLAY_STEPS * accumulate, seconds=REPLAY_S)
    with told("training on one batch again and again failed"):
        per_s = bench.replay(batch, limits, _silent, on_device=False)
    if per_s is None:
        raise LoaderError(
            "Training on one batch again and again was too slow to tell what the model can take. Give demand_per_s="
            "..., in batches per second, or leave the model out to look for the fastest setting."
        )
    return per_s


def _only_loader(bench: Bench) -> DataLoader[Any]:
    parts = parts_of(bench.train_loaders)
    if len(parts) > 1:
        names = ", ".join(part.name for part in parts)
        raise SettingsError(
            f"There are {len(parts)} training loaders ({names}). Tune them one by one: "
            "tune(datamodule.train_dataloader()[...])."
        )
    return parts[0].loader


def _put_back(kept: list[Any]) -> None:
    """Everything as it was, whatever Ctrl-C does meanwhile; the process last, which has the handler of Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for one in reversed(kept):
        one.restore()


def _silent(done: int, most: int) -> None:
    """Nobody asked for the steps of a replay."""
