"""What every callback of this package must survive, alone and together, in both packages."""

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from cells import covering, in_gate
from lightning.pytorch.loggers import CSVLogger
from recording import NullStreamPrefetch, Numbers, Recording, by_hook, fit
from torch.utils.data import DataLoader

import lightning_feed.pl
from lightning_feed import AutotuneCallback, FastDataModule, GPUStarvationCallback, LoaderSettings, PrefetchCallback
from lightning_feed.callbacks.exact_resume import ExactResume

SETS: dict[str, Any] = {
    "PrefetchCallback": lambda: [PrefetchCallback()],
    "prefetching on a null stream": lambda: [NullStreamPrefetch()],
    "GPUStarvationCallback": lambda: [GPUStarvationCallback()],
    "ExactResume": lambda: [ExactResume()],
    "AutotuneCallback": lambda: [AutotuneCallback()],
    "all": lambda: [NullStreamPrefetch(), GPUStarvationCallback(), ExactResume(), AutotuneCallback()],
    "all, the other way round": lambda: [GPUStarvationCallback(), NullStreamPrefetch()],
}
every_set = pytest.mark.parametrize("callbacks", in_gate(SETS, ["all", "all, the other way round"]))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"fast_dev_run": True},
    {"val_check_interval": 3},
    {"accumulate_grad_batches": 2},
    {"max_steps": 5, "max_epochs": -1},
    {"enable_progress_bar": True},
    {"profiler": "simple"},
    {"barebones": True, "enable_checkpointing": None, "logger": None},
]


def loaders() -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(Numbers(24, noise=True), batch_size=2, shuffle=True),
        "val_dataloaders": DataLoader(Numbers(4, noise=True), batch_size=2),
    }


def test_callbacks_with_defaults_can_be_pickled_and_copied() -> None:
    for kind in (PrefetchCallback, GPUStarvationCallback, ExactResume, AutotuneCallback):
        assert pickle.loads(pickle.dumps(kind())) is not None
        assert copy.deepcopy(kind()) is not None


@pytest.mark.parametrize("kind", [PrefetchCallback, GPUStarvationCallback, AutotuneCallback])
def test_passing_a_callback_class_instead_of_an_instance_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "log", vars(kind).get("log"), raising=False)  # Lightning sets it on the class
    _, _, error = fit([kind], loaders)
    assert str(error) == f"callbacks=[{kind.__name__}] holds the class. Write callbacks=[{kind.__name__}()]."


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        # The gate has all callbacks with each of the options; the tests of each callback have it alone.
        pytest.param(made, options, id=f"{name}-{options}", marks=() if name == "all" else pytest.mark.nightly)
        for name, made in SETS.items()
        for options in OPTIONS
    ],
)
@pytest.mark.filterwarnings("ignore:You are trying to `self.log.*barebones=True")
def test_a_fit_with_the_callbacks_matches_one_without_them(callbacks: Any, options: dict[str, Any]) -> None:
    expected = plain_fit(**options)
    ours, _, error = fit(callbacks(), loaders, **options)
    assert error is None
    assert by_hook(ours.events) == by_hook(expected.events)
    assert all(map(torch.equal, ours.parameters(), expected.parameters()))


@functools.cache
def plain_fit(**options: Any) -> Recording:
    """A fit without callbacks, which all sets of callbacks are compared with."""
    model, _, error = fit([], loaders, **options)
    assert error is None
    return model


@every_set
def test_a_fit_with_logger_and_checkpoints_matches_one_without_callbacks(callbacks: Any, tmp_path: Path) -> None:
    def options(name: str) -> dict[str, Any]:
        return {
            "logger": CSVLogger(tmp_path / name),
            "enable_checkpointing": True,
            "log_every_n_steps": 2,
            "default_root_dir": tmp_path / name,
        }

    expected, _, _ = fit([], loaders, **options("plain"))
    ours, _, error = fit(callbacks(), loaders, **options("ours"))
    assert error is None
    assert by_hook(ours.events) == by_hook(expected.events)
    assert all(map(torch.equal, ours.parameters(), expected.parameters()))


@every_set
def test_one_trainer_runs_two_fits_then_validate_test_and_predict(callbacks: Any) -> None:
    model, trainer, error = fit(callbacks(), loaders, max_epochs=1)
    assert error is None
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, **loaders())
    for entry in (trainer.validate, trainer.test, trainer.predict):
        entry(model, dataloaders=DataLoader(Numbers(4), batch_size=2))
    assert len([event for event in model.events if event[0] == "training_step"]) == 24


def attributes(trainer: Any, model: Any) -> list[Any]:
    """Whatever a callback could have put on one of Lightning's objects."""
    places = (trainer.profiler, trainer.precision_plugin, trainer.strategy, trainer.progress_bar_callback, model)
    return [
        name
        for place in places
        for name, value in vars(place).items()
        if "lightning_feed" in (getattr(value, "__module__", "") or type(value).__module__)
    ]


class FailsAt(Recording):
    moment = "training_step"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.moment == "training_step" and batch_idx == 3:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        if self.moment == "validation" and not self.trainer.sanity_checking:
            raise RuntimeError("on purpose")


@covering(callbacks=SETS, moment=["training_step", "validation", "never"])
def test_no_wrapper_is_left_on_trainer_or_model_after_a_fit_or_an_error(callbacks: Any, moment: str) -> None:
    def module() -> FailsAt:
        model = FailsAt()
        model.moment = moment
        return model

    model, trainer, error = fit(callbacks(), loaders, module, enable_progress_bar=True)
    assert (error is None) == (moment == "never")
    assert attributes(trainer, model) == []


class Data(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Numbers(12) if split in ("train", "val") else None


class DataOfPL(lightning_feed.pl.FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Numbers(12) if split in ("train", "val") else None


class ModuleOfPL(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.tolist())
        return self.net(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NullStreamPrefetchOfPL(NullStreamPrefetch, pytorch_lightning.Callback):
    """On both trees: pytorch_lightning before 2.6 refuses callbacks that are not its own."""


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [lightning_feed.pl.PrefetchCallback()],
        lambda: [NullStreamPrefetchOfPL()],
        lambda: [lightning_feed.pl.GPUStarvationCallback()],
        lambda: [lightning_feed.pl.GPUStarvationCallback(), NullStreamPrefetchOfPL()],
    ],
    ids=["PrefetchCallback", "prefetching on a null stream", "GPUStarvationCallback", "both"],
)
def test_a_pytorch_lightning_fit_matches_one_without_the_callbacks(callbacks: Any) -> None:
    def run(made: list[Any]) -> ModuleOfPL:
        pytorch_lightning.seed_everything(5, verbose=False)
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            callbacks=made,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = ModuleOfPL()
        trainer.fit(model, datamodule=DataOfPL(batch_size=2, loader=LoaderSettings(num_workers=0)))
        return model

    expected = run([])
    ours = run(callbacks())
    assert ours.seen == expected.seen
    assert len(ours.seen) == 12
    assert all(map(torch.equal, ours.parameters(), expected.parameters()))


class Normalises(Data):
    def device_transform(self, batch: Any, split: str) -> Any:
        assert split in ("train", "val")
        return (batch - 5.0) / 3.0


@pytest.mark.parametrize("workers", [0, 2])
def test_device_transform_gives_the_same_run_with_and_without_prefetching(workers: int) -> None:
    def data() -> dict[str, Any]:
        return {"datamodule": Normalises(batch_size=2, loader=LoaderSettings(num_workers=workers))}

    expected, _, plain_error = fit([], data)
    ours, _, error = fit([NullStreamPrefetch(), GPUStarvationCallback()], data)
    assert plain_error is None
    assert error is None
    assert by_hook(ours.events) == by_hook(expected.events)
    assert all(map(torch.equal, ours.parameters(), expected.parameters()))
    steps = [event[2] for event in ours.events if event[0] == "training_step"]
    assert min(value for batch in steps for row in batch for value in row) == pytest.approx(-5 / 3)
    # The module's own hooks are not lost to the data module's.
    assert len([event for event in ours.events if event[0] == "transfer_batch_to_device"]) > 0
