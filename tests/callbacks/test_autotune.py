"""AutotuneCallback with made-up trials and starvation: what it sets, what it takes back, what it leaves alone."""

import copy
import json
import logging
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from measure.small_fits import Memory
from measure.test_ranks_gloo import in_ranks
from recording import Numbers, Recording, Stream, by_hook, fit, quiet_trainer
from resuming import Killed, SaveThenDie, run, trained
from scripted_starvation import FED, STARVED, STILL, Scripted, Trials, own_lines
from torch.utils.data import DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings, _host
from lightning_feed.callbacks.autotune import AutotuneCallback, is_late
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.machine import Machine
from lightning_feed.load.order import EpochOrder
from lightning_feed.storage.system import cache_folder
from lightning_feed.trials import background, tune_loader
from lightning_feed.trials.background import BackgroundTrial
from lightning_feed.trials.search import Tuned
from lightning_feed.trials.trial import Setting, Trial

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
SAMPLES, BATCH = 24, 4


THREE_ARE_BEST = {0: 10.0, 1: 11.0, 2: 20.0, 3: 30.0}


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    made = Trials(THREE_ARE_BEST)
    monkeypatch.setattr(tune_loader, "run_trial", made)
    machine = Machine(
        usable_cpus=2,
        cpu_reason="made up",
        available_memory_bytes=2**40,
        free_shm_bytes=2**40,
        start_method=multiprocessing.get_all_start_methods()[0],
    )
    monkeypatch.setattr(tune_loader, "read_machine", lambda: machine)
    return made


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


class Unsized(Sampler[int]):
    """Has no ``__len__``."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain(num_workers=1),
    "plain, no workers": plain(),
    "plain, persistent, seeded": lambda: plain(
        num_workers=1, persistent_workers=True, generator=torch.Generator().manual_seed(3)
    )(),
    "plain, no workers, seeded": lambda: plain(generator=torch.Generator().manual_seed(3))(),
    "ours, no workers, seeded": lambda: ours(
        sampler=RandomSampler(Numbers(SAMPLES), generator=torch.Generator().manual_seed(3))
    )(),
    "ours, no workers, a sampler without a length": lambda: ours(sampler=Unsized())(),
    "ours, persistent, background": ours(num_workers=1, persistent_workers=True, background=2),
    "ours, in an order": lambda: ours(num_workers=1, order=EpochOrder(seed=1, epoch=lambda: 0))(),
    "threads, persistent": ours(num_workers=1, workers="thread", persistent_workers=True),
    "datamodule": module(num_workers=1),
    "datamodule, threads": module(num_workers=1, workers="thread"),
}
every_loader = pytest.mark.parametrize("name", LOADERS)


class DrawsAtOnce(Sampler[int]):
    """Draws when its iteration begins, not when the first index is asked for, as torch's own do."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


SCRIPTS = {"kept": [FED], "taken back": [STARVED, STILL], "set again": [STARVED, (200.0, 100.0), STARVED]}
LOADERS["plain, its sampler draws at once"] = plain(shuffle=False, sampler=DrawsAtOnce())
LOADERS["plain, workers, its sampler draws at once"] = plain(shuffle=False, sampler=DrawsAtOnce(), num_workers=1)


@every_loader
@pytest.mark.parametrize("best", [0, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_same_samples_same_order_same_weights(name: str, best: int, script: str, trials: Trials) -> None:
    """The model has dropout and the samplers draw from torch's generators, so a draw too many would show."""
    expected, _, _ = fit([], LOADERS[name], max_epochs=4)
    own = 0 if "no workers" in name or name == "plain, its sampler draws at once" else 1
    trials.rates = {0: 10.0 + 10.0 * (own == 0), 1: 11.0, 2: 12.0, 3: 13.0, best: 30.0}
    watching, autotune = Watching(), AutotuneCallback(max_workers=3)
    changed, _, error = fit([Scripted(*SCRIPTS[script]), autotune, watching], LOADERS[name], max_epochs=4)
    assert error is None
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))
    later = {"kept": [best] * 3, "taken back": [own] * 3, "set again": [own, best, best]}[script]
    assert [workers for workers, _ in watching.seen] == ([best, *later] if own != best else [own] * 4)
    if "threads" not in name:  # workers that are replaced end
        assert watching.alive == [workers for workers, _ in watching.seen]


def test_one_line_says_what_and_why(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    log = Memory()
    fit([Scripted(FED), autotune := AutotuneCallback(max_workers=3)], plain(num_workers=1), max_epochs=2, logger=log)
    (said,) = own_lines(caplog)
    assert said == (
        "AutotuneCallback, epoch 0: num_workers 1 -> 3, persistent_workers False -> True: the fastest of 4 tried "
        "(120 samples/s). The order of samples stays; random numbers drawn inside workers differ."
    )
    (move,) = autotune.moves
    assert (move.epoch, move.num_workers, move.prefetch_factor, move.persistent_workers) == (0, 3, 2, True)
    mine = [(step, row) for step, row in log.rows if "feed/num_workers" in row]
    assert mine == [(0, {"feed/num_workers": 3.0, "feed/prefetch_factor": 2.0})]


def test_its_own_setting_is_kept_where_no_other_is_clearly_faster(
    trials: Trials, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    trials.rates = {0: 10.0, 1: 28.0, 2: 29.0, 3: 30.0}
    watching, loader = Watching(), plain(num_workers=1)()
    fit([Scripted(STARVED), autotune := AutotuneCallback(max_workers=3), watching], lambda: loader, max_epochs=3)
    assert own_lines(caplog) == [
        "AutotuneCallback keeps num_workers=1, prefetch_factor=2: none of 4 tried is 10% faster."
    ]
    assert autotune.moves == ()
    assert watching.seen == [(1, 2)] * 3


def test_slower_than_promised_is_taken_back(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    watching, autotune = Watching(), AutotuneCallback(max_workers=3)
    fit([Scripted(STARVED, STILL), autotune, watching], plain(num_workers=1), max_epochs=5)
    assert watching.seen == [(3, 2), (1, 2), (1, 2), (1, 2), (1, 2)]
    _, back, kept = own_lines(caplog)
    assert back == (
        "AutotuneCallback, epoch 1: num_workers 3 -> 1, persistent_workers True -> False: steps took 100 ms, 60 of "
        "them waiting, and the trials promised a batch every 33.3 ms."
    )
    assert kept == (
        "AutotuneCallback keeps num_workers=1, prefetch_factor=2: steps take 80 ms, and took 100 with num_workers=3, "
        "prefetch_factor=2."
    )


def test_the_users_loader_is_left_alone(trials: Trials) -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Numbers(SAMPLES), BATCH, shuffle=True, num_workers=1, generator=generator)
    before = dict(vars(loader))
    watching = Watching()
    fit([Scripted(FED), AutotuneCallback(max_workers=3), watching], lambda: {"train_dataloaders": loader})
    assert watching.seen[0] == (3, 2)
    assert vars(loader) == before


@pytest.mark.parametrize("tuner", [(), (AutotuneCallback(max_workers=3),)])
def test_a_report_tells_if_the_run_was_tuned(tuner: tuple[Callback, ...], trials: Trials) -> None:
    starvation = GPUStarvationCallback(nvml=False, report=False)
    fit([*tuner, starvation], plain(num_workers=1))
    assert starvation.report().measurements.facts.tuned is bool(tuner)


def test_a_result_is_remembered(trials: Trials) -> None:
    for _ in range(2):
        fit([Scripted(FED), AutotuneCallback(max_workers=3)], plain(num_workers=1))
    assert [one.num_workers for one in trials.settings] == [0, 1, 2, 3, 3]  # the last one is a check


def test_what_trained_better_is_remembered(trials: Trials) -> None:
    watching = Watching()
    fit([Scripted(STARVED, STILL), AutotuneCallback(max_workers=3)], plain(num_workers=1), max_epochs=3)
    fit([Scripted(STARVED), AutotuneCallback(max_workers=3), watching], plain(num_workers=1), max_epochs=2)
    assert watching.seen == [(1, 2), (1, 2)]
    (kept,) = (cache_folder() / "tuning").iterdir()
    assert json.loads(kept.read_text())["tuned"]["setting"]["num_workers"] == 1


def test_short_epochs_are_put_together(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_feed.callbacks.autotune.FEWEST_STEPS", 150)  # an epoch of the script has 100
    autotune = AutotuneCallback(max_workers=3)
    fit([Scripted(STARVED), autotune], plain(num_workers=1), max_epochs=6)
    assert [(one.epoch, one.num_workers) for one in autotune.moves] == [(0, 3), (2, 1)]


@pytest.mark.parametrize(
    ("workers", "step_ms", "idle_ms", "late"),
    [
        (2, 119, 60, False),  # ten a second were promised
        (2, 121, 60, True),
        (2, 200, 8, False),  # not starved: the model takes the time
        (0, 200, 100, False),  # loading and training take turns
        (0, 200, 121, True),
    ],
)
def test_late(workers: int, step_ms: float, idle_ms: float, late: bool) -> None:
    setting = Setting(num_workers=workers, prefetch_factor=2 if workers else None)
    tuned = Tuned(setting=setting, reason="", trials=(), batches_per_s=10.0)
    assert is_late(tuned, Setting(num_workers=1, prefetch_factor=2), step_ms=step_ms, data_idle_ms=idle_ms) is late


@pytest.mark.parametrize(("own", "late"), [(0, False), (1, True), (3, False)])
def test_not_late_where_its_own_setting_was_slower(own: int, late: bool) -> None:
    """Ten batches a second were promised, and a step takes 150 ms, of which it waits 60."""
    rates = {0: 1000 / 61, 1: 1000 / 149, 3: 1000 / 151}
    settings = {workers: Setting(num_workers=workers, prefetch_factor=2 if workers else None) for workers in (0, 1, 3)}
    trials = tuple(Trial(setting=settings[workers], batches_per_s=rate) for workers, rate in rates.items())
    best = Setting(num_workers=2, prefetch_factor=2)
    tuned = Tuned(setting=best, reason="", trials=trials, batches_per_s=10.0)
    assert is_late(tuned, settings[own], step_ms=150, data_idle_ms=60) is late


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", 100_000])
def test_impossible_limits_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match="max_workers="):
        AutotuneCallback(max_workers=value)


@pytest.mark.parametrize("value", [0, -1.0, float("inf")])
def test_impossible_budgets_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match="budget_s="):
        AutotuneCallback(budget_s=value)


def test_loaders_made_again_get_what_was_found(trials: Trials) -> None:
    watching = Watching()
    callbacks = [Scripted(STARVED, STILL), AutotuneCallback(max_workers=3), watching]
    expected, _, _ = fit([], module(num_workers=1), max_epochs=4, reload_dataloaders_every_n_epochs=1)
    changed, _, error = fit(callbacks, module(num_workers=1), max_epochs=4, reload_dataloaders_every_n_epochs=1)
    assert error is None
    assert watching.seen == [(3, 2), (1, 2), (1, 2), (1, 2)]
    assert by_hook(changed.events) == by_hook(expected.events)
    assert all(map(torch.equal, changed.parameters(), expected.parameters()))
    assert len(trials.settings) == 4


def test_a_second_fit_begins_again(trials: Trials) -> None:
    autotune = AutotuneCallback(max_workers=3)
    model, trainer, _ = fit([Scripted(FED), autotune], plain(num_workers=1), max_epochs=2)
    assert len(autotune.moves) == 1
    trainer.fit_loop.max_epochs = 3
    trials.rates = {0: 10.0, 1: 30.0}
    trainer.fit(model, **plain(num_workers=1, batch_size=2)())
    assert autotune.moves == ()


def test_a_second_callback_stands_aside(trials: Trials, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.callbacks.autotune")
    first, second = AutotuneCallback(max_workers=3), AutotuneCallback()
    fit([Scripted(FED), first, second], plain(num_workers=1), max_epochs=3)
    assert (len(first.moves), len(second.moves)) == (1, 0)
    assert own_lines(caplog)[0] == "AutotuneCallback does nothing: another AutotuneCallback is at work."


# --- the host ---------------------------------------------------------------------------------------------------------


def test_real_trials() -> None:
    """Which setting is found is left to chance."""
    loaders = plain(num_workers=1)
    expected, trainer, _ = fit([], loaders, max_epochs=3)
    autotune = AutotuneCallback(max_workers=2, budget_s=2)
    same, our_trainer, error = fit([autotune], loaders, max_epochs=3)
    assert error is None
    assert autotune._tuned is not None
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
    assert vars(our_trainer.profiler).keys() == vars(trainer.profiler).keys()
    assert "process_dataloader" not in vars(our_trainer.strategy)


def test_without_a_starvation_callback_it_measures_for_itself(trials: Trials) -> None:
    """24 batches of 4 epochs are enough steps for figures."""
    taken: list[Any] = []

    class Listening(AutotuneCallback):
        def _figures(self, trainer: Any) -> Any:
            taken.append(super()._figures(trainer))
            return taken[-1]

    _, _, error = fit([Listening(max_workers=3)], plain(num_workers=1, batch_size=1), max_epochs=4)
    assert error is None
    assert any(taken)


def test_it_can_be_sent_and_copied() -> None:
    autotune = AutotuneCallback(max_workers=3)
    assert copy.deepcopy(autotune).max_workers == pickle.loads(pickle.dumps(autotune)).max_workers == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trial_that_fails_leaves_the_loader_alone(
    workers: int, trials: Trials, caplog: pytest.LogCaptureFixture
) -> None:
    trials.rates = {**THREE_ARE_BEST, workers: DatasetError("Loading from the data set failed: planted.")}
    watching = Watching()
    _, _, error = fit([AutotuneCallback(max_workers=3), watching], plain(num_workers=1), max_epochs=2)
    assert error is None
    assert watching.seen == [(1, 2)] * 2
    assert "could not tune the training loader (lightning_feed.errors.DatasetError: Loading" in caplog.text
    assert "planted" in caplog.text


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


def test_a_run_killed_after_a_move_resumes_exactly(tmp_path: Path, trials: Trials) -> None:
    loaders = module(num_workers=1, persistent_workers=True)
    options: dict[str, Any] = {"max_epochs": 4}
    whole = run(loaders, [], **options)
    autotune, path = AutotuneCallback(max_workers=3), tmp_path / "killed.ckpt"
    died = SaveThenDie("on_train_batch_end", 6 + 2, path)  # in the second epoch, which has other workers
    before = run(loaders, [Scripted(STARVED), autotune, died], **options)
    assert len(autotune.moves) == 2
    again = AutotuneCallback(max_workers=3)
    after = run(loaders, [Scripted(STARVED), again], ckpt_path=path, **options)
    assert len(again.moves) >= 1
    assert before == whole[: len(before)]
    assert after == whole[len(before) :]


# --- two ranks --------------------------------------------------------------------------------------------------------


def fit_on_a_rank(rank: int, late_rank: int) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    tune_loader.run_trial = made = Trials(THREE_ARE_BEST)  # type: ignore[assignment]
    watching, autotune = Watching(), AutotuneCallback(max_workers=3)
    script = Scripted(STARVED, (200.0, 100.0), FED) if rank == late_rank else Scripted(FED)
    torch.manual_seed(0)
    model = Recording()
    trainer = quiet_trainer(
        [script, autotune, watching], devices=2, strategy="ddp", max_epochs=4, use_distributed_sampler=True
    )
    trainer.fit(model, DataLoader(Numbers(SAMPLES), 2, num_workers=1, shuffle=True))
    moves = [(one.epoch, one.num_workers) for one in autotune.moves]
    return {"seen": watching.seen, "moves": moves, "trained": trained(model), "trials": len(made.settings)}


def test_ranks_make_the_same_moves(tmp_path: Path) -> None:
    """One makes the trials. One is late, the other is not: left to themselves one would go back, the other stay."""
    first, second = in_ranks(2, fit_on_a_rank, tmp_path, 1)
    assert first["moves"] == second["moves"] == [[0, 3], [1, 1], [2, 3]]
    assert first["seen"] == second["seen"] == [[3, 2], [1, 2], [3, 2], [3, 2]]
    assert (first["trials"], second["trials"]) == (4, 0)
    assert len(first["trained"]) == len(second["trained"])


def test_killed_is_not_swallowed(trials: Trials) -> None:
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


class Resumable(Batches):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


ASIDE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "iterable": (lambda: {"train_dataloaders": DataLoader(Stream(SAMPLES), BATCH, num_workers=1)}, "is iterable"),
    "several": (
        lambda: {"train_dataloaders": [DataLoader(Numbers(8), 2), DataLoader(Numbers(8), 2)]},
        "2 training loaders",
    ),
    "a state": (lambda: {"train_dataloaders": Resumable()}, "has a state for checkpoints"),
    "its own way": (lambda: {"train_dataloaders": OwnWay(Numbers(8), 2)}, "OwnWay"),
    "stateful": (lambda: {"train_dataloaders": StatefulDataLoader(Numbers(8), 2)}, "StatefulDataLoader"),
}


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


# --- loaders that are not DataLoaders -------------------------------------------------------------------------------


class Drawn:
    """Batches of random numbers of its own generator, which goes on from epoch to epoch."""

    def __init__(self, generator: torch.Generator | None, count: int = 30, fails_at: int | None = None) -> None:
        self.generator, self.count, self.fails_at = generator, count, fails_at
        self.threads: list[str] = []

    def __iter__(self) -> Any:
        for number in range(self.count):
            if number == self.fails_at:
                raise KeyError("no picture")
            self.threads.append(threading.current_thread().name)
            yield torch.rand(2, 4, generator=self.generator)


@pytest.fixture
def thread_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 1 s, and half of it with a thread."""
    monkeypatch.setattr(background, "LEAST_WAIT", 0.0)
    monkeypatch.setattr(BackgroundTrial, "_step_s", lambda trial: 1.0 if trial.state == "watch" else 0.5)


def _drawn(**options: Any) -> tuple[Drawn, Callable[[], dict[str, Any]]]:
    source = Drawn(torch.Generator().manual_seed(1), **options)
    return source, lambda: {"train_dataloaders": source}


@pytest.mark.usefixtures("thread_helps")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 25}, {"max_steps": 50}])
def test_a_thread_ahead_of_a_generator_changes_no_weight(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.callbacks.autotune")
    expected, _, _ = fit([], _drawn()[1], max_epochs=3, **options)
    before = set(threading.enumerate())
    source, loaders = _drawn()
    same, _, error = fit([AutotuneCallback()], loaders, max_epochs=3, **options)
    assert error is None
    assert set(threading.enumerate()) <= before
    assert len(set(source.threads)) > 1  # some batches were drawn by a thread
    assert by_hook(same.events) == by_hook(expected.events)
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
    (said,) = own_lines(caplog)
    assert "AutotuneCallback draws from the training loader (Drawn) in a thread: steps take 500 ms" in said


@pytest.mark.usefixtures("thread_helps")
def test_a_generator_that_draws_from_the_models_random_numbers_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed.callbacks.autotune")
    expected, _, _ = fit([], lambda: {"train_dataloaders": Drawn(None)}, max_epochs=3)
    source = Drawn(None)
    same, _, error = fit([AutotuneCallback()], lambda: {"train_dataloaders": source}, max_epochs=3)
    assert error is None
    assert set(source.threads) == {threading.main_thread().name}
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
    (said,) = own_lines(caplog)
    assert "it draws random numbers from torch's default generator" in said


@pytest.mark.usefixtures("thread_helps")
def test_an_error_of_a_generator_ends_the_fit_as_it_did_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    expected, _, plain_error = fit([], _drawn(fails_at=25)[1], max_epochs=3)
    same, _, error = fit([AutotuneCallback()], _drawn(fails_at=25)[1], max_epochs=3)
    assert (type(error), str(error)) == (type(plain_error), str(plain_error)) == (KeyError, "'no picture'")
    assert all(map(torch.equal, same.parameters(), expected.parameters()))
    assert set(threading.enumerate()) <= before


class Stops(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 20:
            raise RuntimeError("stopped")


@pytest.mark.usefixtures("thread_helps")
def test_an_error_of_training_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    source, loaders = _drawn(count=10**6)
    _, _, error = fit([AutotuneCallback(), Stops()], loaders, max_epochs=1)
    assert str(error) == "stopped"
    assert len(set(source.threads)) > 1
    assert set(threading.enumerate()) <= before
