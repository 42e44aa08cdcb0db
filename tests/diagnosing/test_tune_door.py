"""``tune()``, its command and what they print: on data modules and loaders, which are left as they were."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from trial_steps import QuietMachine

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.callbacks.starvation_loggers import log_hparams, tuned_hparams
from lightning_feed.cli import main
from lightning_feed.diagnosing import program
from lightning_feed.diagnosing import tune as tuning
from lightning_feed.diagnosing.proof import Proof
from lightning_feed.diagnosing.tune import tune, tuned_document, tuned_text, ways_to_apply
from lightning_feed.errors import FeedError, LoaderError, SettingsError
from lightning_feed.load.settings import Setting
from lightning_feed.measure.measurements import LoaderCode
from lightning_feed.trials.search import Trial
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.tune_loader import Tuned

FOUND = Setting(num_workers=2, prefetch_factor=4, persistent_workers=True)
OWN = Setting(num_workers=0)
TRIALS = (
    Trial(setting=OWN, steps_s=(0.1,), start_s=0.1),
    Trial(setting=replace(FOUND, persistent_workers=False), steps_s=(0.02,), start_s=0.3),
    Trial(setting=Setting(num_workers=9, prefetch_factor=2), infeasible="a worker was killed"),
)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(index)) + torch.rand(32)


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.rows = None

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.rows = Rows()

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=4, shuffle=True)


class Two(Data):
    def train_dataloader(self) -> Any:
        return {"a": DataLoader(Rows()), "b": DataLoader(Rows())}


class Tunes:
    """In the place of tune_loader."""

    def __init__(self) -> None:
        self.goals: list[Any] = []
        self.proof: Proof | None = None
        self.others_pct = 0.0
        self.whole = True

    def __call__(self, loader: Any, goal: Any, **options: Any) -> Tuned:
        self.goals.append(goal)
        for trial in TRIALS:
            options["on_trial"](trial)
        return Tuned(
            setting=FOUND,
            own=OWN,
            reason="the fastest of 3 tried",
            trials=TRIALS,
            work=goal.work,
            batch_size=loader.batch_size,
            seconds=7.0,
            whole=self.whole,
        )


@pytest.fixture
def tunes(monkeypatch: pytest.MonkeyPatch) -> Tunes:
    made = Tunes()
    monkeypatch.setattr(tuning, "tune_loader", made)
    monkeypatch.setattr(tuning, "REPLAY_STEPS", 30)
    monkeypatch.setattr(tuning, "prove", lambda session, tuned, seconds: made.proof)
    monkeypatch.setattr(tuning, "OtherPrograms", lambda: QuietMachine(made.others_pct))
    return made


def test_tuning_a_data_module_without_a_model_leaves_it_unchanged(tunes: Tunes) -> None:
    data = Data()
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    found = tune(data, budget_s=12, fresh=True)
    assert found.setting == FOUND
    goal = tunes.goals[0]
    assert (goal.work, goal.budget_s, goal.local_ranks) == (TrainingWork(), 12, 1)
    assert data.trainer is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_tune_measures_the_real_model_and_leaves_it_unchanged(tunes: Tunes) -> None:
    model, data = BoringModel(), Data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False
    )  # fmt: skip
    tune(data, model=model, trainer=trainer)
    goal = tunes.goals[0]
    assert goal.work.step_s > 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("proof", "disturbed", "remembered"),
    [
        (None, {}, FOUND),
        (Proof(setting=FOUND, own_ms=20.0, chosen_ms=10.0), {}, FOUND),
        (Proof(setting=FOUND, own_ms=20.0, chosen_ms=30.0), {}, OWN),
        (None, {"others_pct": 30.0}, None),
        (Proof(setting=FOUND, own_ms=20.0, chosen_ms=10.0), {"others_pct": 30.0}, None),
        (Proof(setting=FOUND, own_ms=20.0, chosen_ms=10.0), {"whole": False}, None),
    ],
)
def test_results_are_remembered_unless_trials_or_their_proof_were_disturbed(
    proof: Proof | None,
    disturbed: dict[str, Any],
    remembered: Setting | None,
    tunes: Tunes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "measure_work", lambda session: TrainingWork(step_s=0.01))
    vars(tunes).update(disturbed, proof=proof)
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False
    )  # fmt: skip
    first = tune(Data(), model=BoringModel(), trainer=trainer)
    assert first.others_pct == tunes.others_pct
    again = tune(Data(), model=BoringModel(), trainer=trainer)
    assert again.remembered is (remembered is not None)
    assert remembered in (None, again.setting)
    assert len(tunes.goals) == (1 if remembered else 2)
    assert not tune(Data(), model=BoringModel(), trainer=trainer, fresh=True).remembered


def test_the_result_for_other_threads_of_torch_does_not_count(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(DataLoader(Rows(), batch_size=4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not tune(DataLoader(Rows(), batch_size=4)).remembered


def test_tune_accepts_a_loader_with_or_without_a_model(tunes: Tunes) -> None:
    loader = DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 8, drop_last=False))
    assert tune(loader).batch_size == 8
    assert tune(DataLoader(Rows(), batch_size=None)).batch_size is None
    tune(loader, model=BoringModel())
    assert tunes.goals[-1].work.step_s > 0


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (
            Rows(),
            {},
            "an object of class Rows is not a torch DataLoader, .* Pass a LightningDataModule, or torch DataLoaders",
        ),
        (Two(), {}, "2 training loaders: a, b. Tune them one by one: .*, loader='a' in a call"),
        (Two(), {"loader": "c"}, "2 training loaders: a, b. None is named 'c'"),
        (Data(), {"loader": "a"}, "there is only one training loader"),
        (Data(), {"budget_s": 0}, "budget_s=0"),
    ],
)
def test_invalid_targets_and_arguments_are_refused(
    target: Any, options: dict[str, Any], said: str, tunes: Tunes
) -> None:
    with pytest.raises(SettingsError, match=said):
        tune(target, **options)


def test_errors_of_the_users_code_are_reported(tunes: Tunes) -> None:
    class Breaks(Data):
        def setup(self, stage: str) -> None:
            raise OSError("no such disk")

    class Untrainable(BoringModel):
        def training_step(self, *_: Any) -> Any:
            raise ValueError("not this batch")

    with pytest.raises(FeedError, match="could not be set up: OSError: no such disk"):
        tune(Breaks())
    with pytest.raises(FeedError, match="training on one batch again and again failed: ValueError: not this batch"):
        tune(Data(), model=Untrainable())
    with pytest.raises(LoaderError, match="yields no batch"):
        tune(DataLoader(Rows(), batch_size=100, drop_last=True), model=BoringModel())


# --- output -----------------------------------------------------------------------------------------------------------


def found(**changes: Any) -> Tuned:
    values: dict[str, Any] = {
        "setting": FOUND, "own": OWN, "reason": "the fastest", "trials": TRIALS, "batch_size": 4, "seconds": 7.0,
    }  # fmt: skip
    return Tuned(**{**values, **changes})


def test_tuning_text_shows_trials_choice_and_code_to_paste() -> None:
    text = tuned_text(found())
    rows = text.splitlines()
    assert rows[0].split() == ["workers", "ahead", "measured"]
    assert rows[1].split() == ["0", "-", "40.0", "samples/s", "yours"]
    assert rows[2].split() == ["2", "4", "200", "samples/s", "<-", "chosen"]
    assert "could not run: a worker was killed" in rows[3]
    assert "2 workers, prefetch_factor=4: the fastest" in text
    arguments = "num_workers=2, prefetch_factor=4, persistent_workers=True, pin_memory=False"
    assert rows[-5:] == [
        "in your training DataLoader:",
        f"    {arguments}",
        "",
        "in the call that makes your FastDataModule:",
        f"    loader=LoaderSettings({arguments})",
    ]
    assert "20 ms a step  <- chosen" in tuned_text(found(work=TrainingWork(step_s=0.01)))
    assert "50.0 batches/s" in tuned_text(found(batch_size=None))
    assert "found by an earlier run (3 settings tried, 7 s); --fresh tries again" in tuned_text(found(remembered=True))
    assert "Other programs took 30 % of the CPUs meanwhile, so this is not remembered" in tuned_text(
        found(others_pct=30.0)
    )
    assert "Your loader has this setting already" in tuned_text(found(setting=OWN))


NONE = Setting(num_workers=0)
THREADS = Setting(num_workers=3, prefetch_factor=2, workers="thread")
IN_DATA = LoaderCode(words="your training DataLoader (Data.train_dataloader, data.py:41)", datamodule="Data")


@pytest.mark.parametrize(
    ("place", "setting", "pasted"),
    [
        (
            replace(IN_DATA, overrides=(("num_workers", "--data.num_workers"),)),
            NONE,
            [
                ("on the command line", "--data.num_workers=0"),
                ("or in YAML, under data", "num_workers: 0"),
                (
                    "and in your training DataLoader (Data.train_dataloader, data.py:41)",
                    "pin_memory=False, prefetch_factor=None, persistent_workers=False",
                ),
            ],
        ),
        (
            LoaderCode(words="your training DataLoader (made in cells/fit.py:3)", form="callback"),
            FOUND,
            [
                (
                    "by AutotuneCallback in callbacks=[...] of the Trainer, or by LIGHTNING_FEED=tune, in your "
                    "training DataLoader (made in cells/fit.py:3)",
                    "AutotuneCallback()",
                )
            ],
        ),
        (
            LoaderCode(words="loader=LoaderSettings(...) of your Birds", form="settings"),
            NONE,
            [
                (
                    "in loader=LoaderSettings(...) of your Birds",
                    "num_workers=0, pin_memory=False",
                )
            ],
        ),
        (
            IN_DATA,
            THREADS,
            [
                (
                    "in the call that makes your FastDataModule",
                    "loader=LoaderSettings(num_workers=3, workers='thread', prefetch_factor=2, "
                    "persistent_workers=False, pin_memory=False)",
                )
            ],
        ),
    ],
)
def test_code_to_paste_matches_how_the_loader_is_made(
    place: LoaderCode, setting: Setting, pasted: list[tuple[str, str]]
) -> None:
    ways = ways_to_apply(found(setting=setting, own=Setting(num_workers=5)), place)
    assert [(way.where, way.code) for way in ways] == pasted
    text = tuned_text(found(setting=setting, own=Setting(num_workers=5)), place)
    assert all(f"{where}:\n    {code}" in text for where, code in pasted)
    assert tuned_document(found(setting=setting), place)["paste"][0]["code"] == pasted[0][1]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_command(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs ``tune`` with the fit of a program."""

    def take_over(_: program.Program, take: Callable[[program.Fit], int]) -> None:
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        raise SystemExit(take(program.Fit(trainer=trainer, model=None, datamodule=Data())))

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as end:
            main(["tune", "train.py", *arguments])
        return int(str(end.value.code))

    monkeypatch.setattr(program, "run_until_fit", take_over)
    return run


def test_tune_command_prints_text_or_json(
    run_command: Callable[..., int], tunes: Tunes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command() == 0
    assert (tunes.goals[0].work, tunes.goals[0].budget_s) == (TrainingWork(), 30)
    assert "test_tune_door.py:" in capsys.readouterr().out
    assert run_command("--json") == 0
    assert json.loads(capsys.readouterr().out)["remembered"] is True
    assert run_command("--json", "--fresh") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["remembered"]) == ("lightning_feed.tuning/1", False)


def test_tune_command_refuses_invalid_options(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "train.py", "--plot", "a.png"]) == 2
    assert "Add --sweep" in capsys.readouterr().err
    assert run_command("--sweep", "0,-2") == 2
    assert "-2 is not a number of workers" in capsys.readouterr().err


# --- hyperparameters --------------------------------------------------------------------------------------------------


class Fast(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Rows() if split in ("train", "val") else None


def sessions(folder: Path) -> dict[str, dict[str, str]]:
    """What TensorBoard's HPARAMS page reads: run -> hyperparameters."""
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import backend_context, metadata

    events = plugin_event_multiplexer.EventMultiplexer()
    events.AddRunsFromDirectory(str(folder))
    events.Reload()
    provider = data_provider.MultiplexerDataProvider(events, str(folder))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider, multiplexer=events))
    read: dict[str, dict[str, str]] = {}
    for run, tags in context.hparams_metadata(RequestContext(), "").items():
        content = tags[metadata.SESSION_START_INFO_TAG]
        read[run] = {
            name: str(value) for name, value in metadata.parse_session_start_info_plugin_data(content).hparams.items()
        }
    return read


def test_tensorboard_keeps_the_users_hyperparameters(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    data = Fast(8, loader=LoaderSettings(num_workers=0))
    assert tuned_hparams(data) == {}
    data.train_dataloader(), data.val_dataloader()
    params = tuned_hparams(data)
    assert params["feed/num_workers"] == 0
    assert not any("val" in name for name in params)
    logger = TensorBoardLogger(tmp_path, name="runs")
    logger.log_hyperparams({"lr": 0.1, "net": {"depth": 3, "act": None}})
    log_hparams(logger, params, {"feed_final/starved_pct": 12.0, "feed_final/samples_per_s": 100.0})
    logger.finalize("success")
    (users,) = sessions(tmp_path).values()
    assert sorted(users) == ["lr", "net/act", "net/depth"]
    assert [folder.name for folder in (tmp_path / "runs").rglob("*") if folder.is_dir()] == [
        "version_0"
    ]  # no other run
    assert set(logger.hparams) == {"lr", "net"}


# --- batches of evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "size"), [("even", 16), (20, 20), (None, 24)])
def test_eval_batch_size_even_leaves_no_small_last_batch(given: Any, size: int) -> None:
    data = Fast(24, eval_batch_size=given, loader=LoaderSettings(num_workers=0))
    assert data.val_dataloader().batch_size == size
    assert data.train_dataloader().batch_size == 24
    report = data.loader_report()
    if given == "even":
        assert "val: eval_batch_size=16: the 64 samples leave 0 for a last batch, instead of 16 with 24" in report
    else:
        assert f'val: eval_batch_size={size}: "even" would take 16' in report
    assert "train: eval_batch_size" not in report
