"""The live iterators of a fit, found in both packages, in every mode of several loaders, with a prefetcher or not."""

from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.combined_loader import CombinedLoader as OtherCombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_feed import PrefetchCallback, _host, pl
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.loader_pass import LoaderPass
from lightning_feed.measure.hook_times import tap_profiler
from lightning_feed.measure.loader_watch import LoaderWatch
from lightning_feed.transfer.prefetcher import SideStream

pytestmark = pytest.mark.filterwarnings(
    # What Lightning says of small runs without workers, and of the length of an iterable dataset.
    "ignore:.*does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
    "ignore:Starting from v1.9.0:UserWarning",
    # A LightningModule that logs nothing still imports a deprecated part of torch in 2.4.0.
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*:DeprecationWarning",
)
PACKAGES = [lightning.pytorch, pytorch_lightning]


class Ones(Dataset[torch.Tensor]):
    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.length:
            raise IndexError
        return torch.ones(4)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(8, 4))


def prefetcher(package: Any) -> Any:
    """The whole injection, with no stream, on the callback class of the package."""

    class CpuPrefetch(PrefetchCallback if package is lightning.pytorch else pl.PrefetchCallback):  # type: ignore[misc]
        def open_stream(self, device: torch.device) -> SideStream:
            return SideStream()

    return CpuPrefetch()


def make_model(package: Any) -> Any:
    class Model(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches = batch if isinstance(batch, (list, tuple)) else [batch]
            return sum(self.layer(each).sum() for each in batches if each is not None)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


def fit(package: Any, loaders: Any, *others: Any, **options: Any) -> Any:
    """What was found: at each step, and after the fit."""
    found: list[list[Any]] = []

    class Look(package.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            found.append(_host.loop_iterators(trainer, "fit"))

    trainer = package.Trainer(
        callbacks=[*others, Look()],
        max_epochs=options.pop("max_epochs", 1),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    assert _host.loop_iterators(trainer, "fit") == []
    trainer.fit(make_model(package), loaders)
    assert _host.loop_iterators(trainer, "fit") == []
    return found


@pytest.mark.parametrize(
    "mode",
    ["min_size", "max_size", "max_size_cycle"],  # a fit refuses "sequential"
)
@pytest.mark.parametrize("package", PACKAGES)
def test_loop_iterators_lists_every_combined_loader(package: Any, mode: Any) -> None:
    combine = CombinedLoader if package is lightning.pytorch else OtherCombinedLoader
    found = fit(package, combine([DataLoader(Ones(6)), DataLoader(Ones(3))], mode=mode))
    steps = {"min_size": 3, "max_size": 6, "max_size_cycle": 6}[mode]
    assert [len(each) for each in found] == [2] * steps
    if mode == "max_size_cycle":
        assert found[2][1] is not found[3][1]
        assert found[2][0] is found[3][0]


@pytest.mark.parametrize("package", PACKAGES)
def test_loop_iterators_finds_a_feed_loader_under_a_prefetcher(package: Any) -> None:
    found = fit(package, FeedLoader(Ones(), batch_size=2, background=1), prefetcher(package))
    assert [len(each) for each in found] == [1] * 4
    assert isinstance(found[0][0], LoaderPass)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("package", PACKAGES)
def test_loader_watch_measures_the_loader_of_a_fit(package: Any, prefetch: bool) -> None:
    """As GPUStarvationCallback does it: both marks of the loop's fetch, and a window at its logging interval."""
    stats: list[Any] = []

    class Watching(package.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch = LoaderWatch(lambda: _host.loop_iterators(trainer, "fit"))
            fetch = _host.actions(trainer, "fit")["fetch"]
            self.undo = tap_profiler(
                trainer.profiler,
                {fetch: self.watch.fetch_began},
                {fetch: self.watch.fetch_ended},
                does_nothing=_host.profiler_does_nothing(trainer),
            )

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch.epoch_began()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            stats.append(self.watch.total())
            self.undo()
            self.watch.close()

    loader = DataLoader(Ones(60), batch_size=2, num_workers=1, prefetch_factor=2, persistent_workers=True)
    fit(package, loader, *([prefetcher(package)] if prefetch else []), Watching(), max_epochs=2)
    (seen,) = stats
    assert seen.queue_capacity == 2
    assert seen.queue_ready is not None
    assert 0 <= seen.queue_ready <= 2
    assert seen.head_of_line_pct == 0  # one worker has no later batches
    assert seen.produced_per_s > 0
    if seen.workers_on_cpu_pct is not None:
        assert seen.workers_on_cpu_pct + seen.workers_run_queue_pct + seen.workers_blocked_pct == pytest.approx(100)
