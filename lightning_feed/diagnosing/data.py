"""The experiments with the training loader, and what is known of a run that has no fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning_feed.diagnosing.fits import Bench
from lightning_feed.diagnosing.replay import own_loaders
from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.machine import read_machine
from lightning_feed.watch.experiments.data_experiments import run_data_experiments
from lightning_feed.watch.experiments.results import ExperimentResults, KeyUse
from lightning_feed.watch.experiments.session import key_bytes, parts_of
from lightning_feed.watch.verdict.diagnosis import LoopFacts

_PARTS = {
    "X3": ("loader", "keys", "workers"),
    "X4": ("cached-files", "disk"),
    "X5": ("transforms", "functions", "no-transforms", "uint8", "device-decode"),
    "X6": ("cold-files", "disk"),
    "X7": ("constant-samples", "hand-over"),
    "X8": ("copies",),
}
"""The experiments with the loader that stand for each name that a user can ask for."""


def request_loaders(bench: Bench) -> None:
    """Get the training loaders of a bench without a fit, as Lightning would.

    Raises:
        SettingsError: when there are none.
    """
    if bench.loaders is not None:
        bench.train_loaders = bench.loaders
        return
    owner = bench.model if bench.datamodule is None else bench.datamodule
    if bench.datamodule is None or owner.trainer is None:  # a module raises where it has none
        owner.trainer = bench.trainer
    owner.prepare_data()
    owner.setup("fit")
    bench.train_loaders = owner.train_dataloader()
    if bench.train_loaders is None:
        raise SettingsError(
            f"{type(owner).__name__}.train_dataloader() gives None, so there is nothing to load from. Have "
            "it return the training loader, such as a DataLoader."
        )


def loader_facts(bench: Bench) -> LoopFacts:
    """What is known where no fit was measured."""
    try:
        loaders = [part.loader for part in parts_of(bench.train_loaders)]
    except LoaderError:  # no DataLoader: nothing is known of it
        loaders = []
    names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order", "batch_size")
    known: dict[str, Any] = {name: getattr(loaders[0], name, None) for name in names} if loaders else {}
    if len(loaders) > 1:
        known["num_workers"] = min(loader.num_workers for loader in loaders)
        known["batch_size"] = None
    return LoopFacts(
        device_type=bench.trainer.strategy.root_device.type, usable_cpus=read_machine().usable_cpus, **known
    )


def measure_loader(
    bench: Bench, wanted: list[str], budget_s: float, on_progress: Callable[[str, float], object]
) -> Iterator[ExperimentResults]:
    """[X3 to X8] All results so far after each of the experiments.

    Args:
        bench: its ``train_loaders`` are measured.
        wanted: names.
        budget_s: for all.
        on_progress: told what begins, and the share that is done.

    Raises:
        FeedError: a sample cannot be loaded, or the loader hangs.
    """
    names = frozenset(name for each in wanted for name in _PARTS[each])
    device = bench.trainer.strategy.root_device
    return run_data_experiments(
        own_loaders(bench.train_loaders), device=device, budget_s=budget_s, only=names, on_progress=on_progress
    )


def with_key_uses(results: ExperimentResults, bench: Bench) -> ExperimentResults:
    """The parts of the batch, with whether the step used them."""
    keys, first = results.keys, bench.host_batches.first
    if not keys and first is not None:
        keys = tuple(KeyUse(name=name, bytes_per_batch=size, used=None) for name, size in key_bytes(first).items())
    return replace(results, keys=tuple(replace(key, used=bench.uses.get(key.name)) for key in keys))
