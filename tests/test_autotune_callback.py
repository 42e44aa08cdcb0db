"""AutotuneCallback in fits whose measured starvation is made up: what it changes, and what it leaves alone."""

import copy
import logging
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from recording import Numbers, Recording, Stream, by_hook, fit, quiet_trainer
from resuming import Killed, SaveThenDie, run, trained
from scripted_starvation import FED, STARVED, STILL, Scripted, own_lines, sums_of
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from watch.small_fits import Memory
from watch.test_ranks_gloo import in_ranks

from lightning_feed import FastDataModule, LoaderSettings, _host
from lightning_feed.callbacks.autotune import AutotuneCallback, figures_of
from lightning_feed.errors import SettingsError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.machine import Machine
from lightning_feed.load.order import EpochOrder
from lightning_feed.watch.loader_watch import LoaderSums
from lightning_feed.watch.loop import LoopSums
from lightning_feed.watch.windows import Sums

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
SAMPLES, BATCH = 24, 4


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(
        usable_cpus=8,
        cpu_reason="made up",
        available_memory_bytes=2**40,
        free_shm_bytes=2**40,
        start_method=multiprocessing.get_all_start_methods()[0],
    )
    monkeypatch.setattr("lightning_feed.callbacks.autotune.read_machine", lambda: machine)


class Watching(Callback):
    """The settings of the training loader, and its living workers, at the first batch of each epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []
        self.alive: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            (loader,) = _host.train_loaders(trainer)
            self.seen.append((loader.num_workers, loader.prefetch_factor))
            self.alive.append(len(multiprocessing.active_children()))


def plain(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "train_dataloaders": DataLoader(Numbers(SAMPLES), **{"batch_size": BATCH, "shuffle": True, **options})
    }


def ours(**options: Any) -> Callable[[], dict[str, Any]]:
    def loaders() -> dict[str, Any]:
        data = Numbers(SAMPLES)
        sampler = RandomSampler(data)
        return {"train_dataloaders": FeedLoader(data, **{"batch_size": BATCH, "sampler": sampler, **options})}

    return loaders


class Birds(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Numbers(SAMPLES) if split == "train" else None


def module(**settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"datamodule": Birds(BATCH, loader=LoaderSettings(**settings))}


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain(num_workers=1),
    "plain, no workers": plain(),
    "plain, persistent, seeded": lambda: plain(
        num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(3)
    )(),
    "ours, persistent, background": ours(num_workers=1, persistent_workers=True, background=2),
    "ours, in an order": lambda: ours(num_workers=1, order=EpochOrder(seed=1, epoch=lambda: 0))(),
    "threads, persistent": ours(num_workers=1, workers="thread", persistent_workers=True),
    "datamodule": module(num_workers=1),
    "datamodule, threads": module(num_workers=1, workers="thread"),
}
every_loader = pytest.mark.parametrize("name", LOADERS)


@every_loader
def test_same_samples_same_order_same_weights(name: str) -> None:
    """The model has dropout and the samplers draw from torch's generators, so a draw too many would show."""
    expected, _, _ = fit([], LOADERS[name], max_epochs=4)
    watching, autotune = Watching(), AutotuneCallback()
    changed, _, error = fit([Scripted(STARVED, STILL, FED), autotune, watching], LOADERS[name], max_epochs=4)
    assert error is None
    assert [one.move.kind for one in autotune.moves] == ["up", "up"]
    assert len(set(watching.seen)) == 3
    assert [workers for workers, _ in watching.seen[:3]] == sorted({workers for workers, _ in watching.seen})
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))
    if "persistent" in name and "threads" not in name:  # workers that are replaced end
        assert watching.alive == [workers for workers, _ in watching.seen]


def test_the_generator_of_the_loader_is_its_own_again() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        Numbers(SAMPLES), BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=generator
    )
    autotune = AutotuneCallback()
    fit([Scripted(STARVED, FED), autotune], lambda: {"train_dataloaders": loader}, max_epochs=3)
    assert len(autotune.moves) == 1
    assert loader.generator is generator


def test_what_made_it_worse_is_taken_back_and_that_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    watching, autotune, log = Watching(), AutotuneCallback(), Memory()
    script = Scripted(STARVED, (150.0, 60.0), STARVED)
    fit([script, autotune, watching], plain(num_workers=1), max_epochs=6, logger=log)
    assert [one.move.kind for one in autotune.moves] == ["up", "back"]
    assert [one.epoch for one in autotune.moves] == [1, 2]
    assert watching.seen == [(1, 2), (3, 2), (1, 2), (1, 2), (1, 2), (1, 2)]
    said = own_lines(caplog)
    assert said[0].startswith("AutotuneCallback, epoch 1: num_workers 1 -> 3: each step of 100 ms waits 60 ms (60 %)")
    assert said[1].startswith("AutotuneCallback, epoch 2: num_workers 3 -> 1: the last change is taken back")
    assert said[2:] == ["AutotuneCallback is done: the last change was taken back."]
    mine = [(step, row) for step, row in log.rows if "feed/num_workers" in row]
    assert mine == [
        (step, {"feed/num_workers": workers, "feed/prefetch_factor": 2.0})
        for step, workers in ((0, 1.0), (6, 3.0), (12, 1.0))
    ]


def test_three_moves_then_nothing() -> None:
    watching, autotune = Watching(), AutotuneCallback()
    script = Scripted(*((100.0 * 0.9**k, 30.0 * 0.9**k) for k in range(8)))
    loaders = module(num_workers=1)
    fit([script, autotune, watching], loaders, max_epochs=5)
    assert [one.move.num_workers for one in autotune.moves] == [2, 4, 7]
    assert [workers for workers, _ in watching.seen] == [1, 2, 4, 7, 7]


def test_short_epochs_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_feed.callbacks.autotune.FEWEST_STEPS", 150)  # an epoch of the script has 100
    autotune = AutotuneCallback()
    fit([Scripted(STARVED), autotune], plain(num_workers=1), max_epochs=6)
    assert [(one.epoch, one.move.kind) for one in autotune.moves] == [(2, "up"), (4, "back")]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")  # on purpose, to be given back
def test_fewer_workers_where_the_queue_is_never_empty() -> None:
    watching = Watching()
    script = Scripted(FED, ready=7.9)
    fit([script, AutotuneCallback(), watching], plain(num_workers=4), max_epochs=5)
    assert [workers for workers, _ in watching.seen] == [4, 3, 3, 3, 3]  # a quarter of 3 is less than one


def test_the_users_limit_holds() -> None:
    autotune = AutotuneCallback(max_workers=2)
    fit([Scripted(STARVED), autotune], plain(num_workers=1), max_epochs=4)
    assert [one.move.num_workers for one in autotune.moves] == [2, 1]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", 100_000])
def test_impossible_limits_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match="max_workers="):
        AutotuneCallback(max_workers=value)


def test_loaders_made_anew_get_what_was_decided() -> None:
    watching = Watching()
    callbacks = [Scripted(STARVED, FED), AutotuneCallback(), watching]
    expected, _, _ = fit([], module(num_workers=1), max_epochs=4, reload_dataloaders_every_n_epochs=1)
    changed, _, error = fit(callbacks, module(num_workers=1), max_epochs=4, reload_dataloaders_every_n_epochs=1)
    assert error is None
    assert watching.seen == [(1, 2), (3, 2), (3, 2), (3, 2)]
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))


def test_a_second_fit_begins_anew() -> None:
    autotune = AutotuneCallback()
    model, trainer, _ = fit([Scripted(STARVED, FED), autotune], plain(num_workers=1), max_epochs=2)
    assert len(autotune.moves) == 1
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, **plain(num_workers=1)())
    assert autotune.moves == ()


def test_a_second_callback_stands_aside(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.callbacks.autotune")
    first, second = AutotuneCallback(), AutotuneCallback()
    fit([Scripted(STARVED, FED), first, second], plain(num_workers=1), max_epochs=3)
    assert (len(first.moves), len(second.moves)) == (1, 0)
    assert own_lines(caplog)[0] == "AutotuneCallback does nothing: another AutotuneCallback is at work."


# --- the host ---------------------------------------------------------------------------------------------------------


def test_without_a_starvation_callback_it_measures_for_itself() -> None:
    """24 batches of 4 epochs are enough steps for figures; what they are is left to chance, and so no move is asked."""
    taken: list[Any] = []

    class Listening(AutotuneCallback):
        def _tell(self, trainer: Any) -> Any:
            taken.append(super()._tell(trainer))
            return taken[-1]

    loaders = plain(num_workers=0, batch_size=1)
    expected, trainer, _ = fit([], loaders, max_epochs=4)
    same, our_trainer, error = fit([Listening(max_workers=1)], loaders, max_epochs=4)
    assert error is None
    assert taken[-1].figures is not None
    assert taken[-1].figures.steps >= 20
    assert by_hook(same.events) == by_hook(expected.events)
    assert vars(our_trainer.profiler).keys() == vars(trainer.profiler).keys()


def test_it_can_be_sent_and_copied() -> None:
    autotune = AutotuneCallback(max_workers=3)
    assert copy.deepcopy(autotune).max_workers == pickle.loads(pickle.dumps(autotune)).max_workers == 3


def test_it_is_taken_out_after_an_error() -> None:
    class Fails(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.current_epoch == 1:
                raise ValueError("planted")
            return super().training_step(batch, batch_idx)

    _, plain_trainer, _ = fit([], plain())
    _, trainer, error = fit([AutotuneCallback()], plain(), Fails)
    assert "planted" in str(error)
    assert vars(trainer.profiler).keys() == vars(plain_trainer.profiler).keys()


def test_a_run_killed_after_a_move_resumes_exactly(tmp_path: Path) -> None:
    loaders = module(num_workers=1, persistent_workers=True)
    options: dict[str, Any] = {"max_epochs": 4}
    whole = run(loaders, [], **options)
    autotune, path = AutotuneCallback(), tmp_path / "killed.ckpt"
    died = SaveThenDie("on_train_batch_end", 6 + 2, path)  # in the second epoch, which has other workers
    before = run(loaders, [Scripted(STARVED, STILL, FED), autotune, died], **options)
    assert len(autotune.moves) == 1
    again = AutotuneCallback()
    after = run(loaders, [Scripted(STARVED, STILL, FED), again], ckpt_path=path, **options)
    assert again.moves
    assert before == whole[: len(before)]
    assert after == whole[len(before) :]


# --- two ranks --------------------------------------------------------------------------------------------------------


def fit_on_a_rank(rank: int, starved_rank: int) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    watching, autotune = Watching(), AutotuneCallback(max_workers=3)
    script = Scripted(STARVED, FED) if rank == starved_rank else Scripted(FED, ready=8.0)
    torch.manual_seed(0)
    model = Recording()
    trainer = quiet_trainer(
        [script, autotune, watching], devices=2, strategy="ddp", max_epochs=4, use_distributed_sampler=True
    )
    trainer.fit(model, DataLoader(Numbers(SAMPLES), 2, num_workers=1, shuffle=True))
    kinds = [(one.epoch, one.move.kind, one.move.num_workers) for one in autotune.moves]
    return {"seen": watching.seen, "moves": kinds, "trained": trained(model)}


def test_ranks_make_the_same_moves(tmp_path: Path) -> None:
    """One rank is starved, the other has a full queue: left to themselves one would go up and the other stay."""
    first, second = in_ranks(2, fit_on_a_rank, tmp_path, 1)
    assert first["moves"] == second["moves"] == [[1, "up", 3]]
    assert first["seen"] == second["seen"] == [[1, 2], [3, 2], [3, 2], [3, 2]]
    assert len(first["trained"]) == len(second["trained"])


def test_killed_is_not_swallowed() -> None:
    class Dies(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 2:
                raise Killed

    _, _, error = fit([Scripted(STARVED, FED), AutotuneCallback(), Dies()], plain(num_workers=1), max_epochs=4)
    assert isinstance(error, Killed)


# --- where it changes nothing -----------------------------------------------------------------------------------------


class Batches:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 4)] * 3)


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


ASIDE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "iterable": (lambda: {"train_dataloaders": DataLoader(Stream(SAMPLES), BATCH, num_workers=1)}, "is iterable"),
    "several": (
        lambda: {"train_dataloaders": [DataLoader(Numbers(8), 2), DataLoader(Numbers(8), 2)]},
        "2 training loaders",
    ),
    "no DataLoader": (lambda: {"train_dataloaders": Batches()}, "is no DataLoader"),
    "its own way": (lambda: {"train_dataloaders": OwnWay(Numbers(8), 2)}, "OwnWay"),
    "stateful": (lambda: {"train_dataloaders": StatefulDataLoader(Numbers(8), 2)}, "StatefulDataLoader"),
    "a dataset that no worker can use": (lambda: {"train_dataloaders": DataLoader(Only(), 2)}, "a worker process"),
}


class Only(Numbers):
    """As one that holds what belongs to the training process."""

    def __init__(self) -> None:
        super().__init__(8)

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("wrong process")
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13 and later
@pytest.mark.parametrize(("loaders", "why"), ASIDE.values(), ids=list(ASIDE))
def test_it_stands_aside_and_says_so_once(loaders: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.callbacks.autotune")
    expected, _, _ = fit([], loaders, max_epochs=2)
    autotune = AutotuneCallback()
    same, _, error = fit([Scripted(STARVED), autotune], loaders, max_epochs=2)
    assert error is None
    assert autotune.moves == ()
    (said,) = own_lines(caplog)
    assert "does nothing" in said
    assert why in said
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))


# --- figures of an epoch, out of sums of a run ------------------------------------------------------------------------

FIRST, SECOND = (100, 50.0, 20.0, 1.0, 8.0, 90.0), (60, 30.0, 3.0, 6.0, 8.0, 40.0)


def test_each_epoch_has_its_own_figures() -> None:
    before = sums_of(FIRST)
    for sums, (steps, step_ms, idle_ms, ready, _, cpu) in ((before, FIRST), (sums_of(FIRST, SECOND) - before, SECOND)):
        found = figures_of(sums)
        assert found is not None
        assert found.steps == steps
        assert found.step_ms == pytest.approx(step_ms)
        assert found.data_idle_ms == pytest.approx(idle_ms)
        assert found.queue_ready == pytest.approx(ready)
        assert found.queue_capacity == pytest.approx(8)
        assert found.on_cpu_pct == pytest.approx(cpu)
        assert found.run_queue_pct == pytest.approx(cpu / 2)


def test_a_few_steps_are_none() -> None:
    assert figures_of(sums_of((19, *FIRST[1:]))) is None
    assert figures_of(sums_of((20, *FIRST[1:]))) is not None


def test_what_is_not_known_is_none() -> None:
    found = figures_of(LoopSums(Sums(steps=100, data_ns=1e8, compute_ns=4e8), LoaderSums()))
    assert found is not None
    assert (found.queue_ready, found.queue_capacity, found.on_cpu_pct, found.run_queue_pct) == (None,) * 4
