"""What kinds of training can be diagnosed, what of them is kept and left out, what is refused; with which pace."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import in_gate
from diagnosing.small_runs import PACKAGES, Numbers, make_parts, make_trainer, short_diagnosis
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from measure.small_fits import CpuPrefetch
from simulated.device import SimulatedDevice
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings, tune
from lightning_feed._host import package_of
from lightning_feed.diagnosing import batches, diagnose, run
from lightning_feed.diagnosing import short_fits as session
from lightning_feed.diagnosing.batches import Pace
from lightning_feed.diagnosing.failures import DiagnosisInterrupted
from lightning_feed.diagnosing.session import Session
from lightning_feed.diagnosing.short_fits import FitLength, replay
from lightning_feed.errors import SettingsError
from lightning_feed.report.document import read_document

Module, Data = make_parts()


def results_of(model: Any, data: Any = None, *, trainer: Any = None, **options: Any) -> Any:
    if data is None and "train_dataloaders" not in options:
        data = Data()
    found = short_diagnosis(trainer or make_trainer(), model, data, **options)
    assert found.stats.steps >= 10
    return found.measurements.experiments


# --- kinds of training --------------------------------------------------------------------------------------------


class Manual(Module):  # type: ignore[misc,valid-type]
    """Two optimizers, stepped by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, part in zip(self.optimizers(), (self.net[0], self.net[3]), strict=True):
            assert part is not None
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD([self.net[0].weight], lr=0.1)
        second = torch.optim.SGD(self.net[3].parameters(), lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 5)]


class OneCycle(Module):  # type: ignore[misc,valid-type]
    """A schedule that raises when it is stepped past the end of the training that was planned."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        assert self.trainer.estimated_stepping_batches > 0
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_manual_optimization_with_two_optimizers_is_diagnosed() -> None:
    results = results_of(Manual(), only=["model"])
    assert results.model_per_s > 0


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_epochs": None, "max_steps": 7}, {"max_epochs": -1}])
def test_trainings_shorter_than_the_experiments_are_diagnosed(limits: dict[str, Any]) -> None:
    model = OneCycle() if limits["max_epochs"] != -1 else Module()
    assert results_of(model, trainer=make_trainer(**limits)).model_per_s > 0


def test_accumulation_clipping_and_precision_are_kept() -> None:
    seen = set()

    class Looks(Module):  # type: ignore[misc,valid-type]
        def on_train_start(self) -> None:
            seen.add((self.trainer.accumulate_grad_batches, self.trainer.gradient_clip_val, self.trainer.precision))

    trainer = make_trainer(accumulate_grad_batches=3, gradient_clip_val=0.5, precision="bf16-mixed")
    assert results_of(Looks(), trainer=trainer).model_per_s > 0
    assert seen == {(3, 0.5, "bf16-mixed")}


def test_prefetching_is_kept_with_a_copy_of_the_callback() -> None:
    mine = CpuPrefetch()
    found = short_diagnosis(make_trainer(callbacks=[mine]), Module(), Data(), only=["model"])
    assert found.stats.prefetch_active is True
    assert not mine.active
    assert found.measurements.experiments.model_per_s > 0


def test_diagnosis_works_with_callbacks_enabled_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FEED", "1")
    assert results_of(Module()).model_per_s > 0


def test_fast_data_module_without_workers_is_diagnosed() -> None:
    """Its loader leads to the module, to the hooks replaced there, and so to the session: that is not restored."""

    class Ours(FastDataModule):
        def make_dataset(self, split: str) -> Any:
            return Numbers() if split == "train" else None

    results = results_of(Module(), Ours(4, loader=LoaderSettings(num_workers=0)), only=["model"])
    assert results.model_per_s > 0


def test_training_with_several_loaders_is_diagnosed() -> None:
    class Two(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum(nn.functional.cross_entropy(self.net(x), y) for x, y in batch.values())  # type: ignore[return-value]

    loaders = {"a": DataLoader(Numbers(), batch_size=4), "b": DataLoader(Numbers(8), batch_size=2)}
    results = results_of(Two(), train_dataloaders=loaders)
    assert results.model_per_s > 0


class Endless(Sampler[int]):
    def __iter__(self) -> Any:
        return itertools.cycle(range(24))


class SaysAnother(DataLoader[Any]):
    """Gives 6 batches."""

    says = 6

    def __len__(self) -> int:
        return self.says


class SaysMore(SaysAnother):
    says = 600


class SaysLess(SaysAnother):
    says = 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), 4, sampler=Endless()),
        lambda: SaysMore(Numbers(), 4),
        pytest.param(lambda: SaysLess(Numbers(), 4), marks=pytest.mark.nightly),
    ],
    ids=["endless", "more", "less"],
)
def test_loaders_with_a_wrong_length_are_diagnosed(make: Any) -> None:
    found = results_of(Module(), train_dataloaders=make(), only=["model", "loader"])
    assert found.loader_per_s > 0
    assert found.model_per_s > 0


def test_training_step_with_dataloader_iter_is_left_out_with_a_reason() -> None:
    class Fetches(Module):  # type: ignore[misc,valid-type]
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    found = short_diagnosis(make_trainer(), Fetches(), Data(), only=["model"])
    left_out = dict(found.measurements.experiments.left_out)
    assert "fetches for itself" in left_out["model"]


def test_replay_on_the_device_does_not_repeat_the_batch_transfer() -> None:
    calls = {"on_after_batch_transfer": 0}

    class Transfers(Data):  # type: ignore[misc,valid-type]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls["on_after_batch_transfer"] += 1
            return batch

    results_of(Module(), Transfers())
    assert calls["on_after_batch_transfer"] <= run.QUICK_RUN_STEPS + session.WARM_UP_STEPS


@pytest.mark.parametrize("whole", in_gate([True, False], [True]))
def test_compiled_modules_are_diagnosed(whole: bool) -> None:
    class Plain(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    model = Plain()
    compiled: Any = model
    if whole:
        compiled = torch.compile(model, backend="eager")
    else:
        model.net.compile(backend="eager")
    found = short_diagnosis(make_trainer(), compiled, Data(), only=["model"])
    assert found.measurements.experiments.model_per_s > 0


# --- what is left out ---------------------------------------------------------------------------------------------


class Talks(Module):  # type: ignore[misc,valid-type]
    """Needs a logger and its data module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.add_image("x", batch[0])
        assert self.trainer.datamodule.dataset.length == 24
        return super().training_step(batch, batch_idx)


def test_loggers_callbacks_and_validation_are_skipped_and_named(tmp_path: Path) -> None:
    class Counts(Callback):
        calls = 0

        def on_train_batch_end(self, *args: Any) -> None:
            Counts.calls += 1

    class Validates(Data):  # type: ignore[misc,valid-type]
        def val_dataloader(self) -> Any:
            raise AssertionError("validation is not measured")

    class Brings(Talks):
        def configure_callbacks(self) -> Any:
            return [Counts()]

        def validation_step(self, *_: Any) -> None:
            raise AssertionError("validation is not measured")

    callbacks = [Counts(), GPUStarvationCallback(), ModelCheckpoint(tmp_path, every_n_train_steps=20)]
    options = {"enable_checkpointing": True, "default_root_dir": str(tmp_path), "val_check_interval": 5}
    trainer = make_trainer(logger=CSVLogger(tmp_path), callbacks=callbacks, **options)
    found = short_diagnosis(trainer, Brings(), Validates())
    assert Counts.calls == 0
    assert list(tmp_path.iterdir()) == []
    assert dict(found.measurements.experiments.left_out)["the rest of the fit"].startswith(
        "validation, ModelCheckpoint, CSVLogger, Counts: not run, "
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_end_of_training_hooks_are_not_called(package: str) -> None:
    PackageModule, PackageData = make_parts(package)
    ends: list[str] = []

    class Uploads(PackageModule):  # type: ignore[misc,valid-type]
        def on_fit_end(self) -> None:
            ends.append("on_fit_end")

        def on_train_end(self) -> None:
            ends.append("on_train_end")

        def teardown(self, stage: str) -> None:
            ends.append("teardown")

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            ends.append("on_save_checkpoint")

    class Cleans(PackageData):  # type: ignore[misc,valid-type]
        def teardown(self, stage: str) -> None:
            ends.append(f"data {stage}")

    short_diagnosis(make_trainer(package), Uploads(), Cleans())
    assert ends == ["data fit"]  # once, as it was set up once


@pytest.mark.parametrize(("interval", "package"), [("step", "lightning.pytorch"), ("epoch", "pytorch_lightning")])
def test_reduce_lr_on_plateau_with_a_validation_metric_is_diagnosed(interval: str, package: str) -> None:
    PackageModule, PackageData = make_parts(package)

    class Detector(PackageModule):  # type: ignore[misc,valid-type]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_map", 0.5)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
            scheduler = {"scheduler": plateau, "monitor": "val_map", "interval": interval, "frequency": 3}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    class Validated(PackageData):  # type: ignore[misc,valid-type]
        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    found = short_diagnosis(make_trainer(package), Detector(), Validated())
    assert found.stats.steps >= 10
    assert found.measurements.experiments.model_per_s > 0
    if interval == "step":
        assert tune(Validated(), model=Detector(), budget_s=1, fresh=True).work.step_s > 0


# --- batches of several lengths, and of no known kind -------------------------------------------------------------


class Sentences(Dataset[Any]):
    """Sorted by length, and padded batch by batch."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.zeros(10 + index // 4, dtype=torch.long), "y": torch.tensor(index % 2)}


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([one["ids"] for one in samples], batch_first=True)
    return {"ids": ids, "y": torch.stack([one["y"] for one in samples])}


def test_replayed_batches_have_the_lengths_of_the_run() -> None:
    lengths: list[list[int]] = []

    class Text(Module):  # type: ignore[misc,valid-type]
        def on_train_start(self) -> None:
            lengths.append([])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            lengths[-1].append(batch["ids"].shape[1])
            return torch.nn.functional.cross_entropy(self.net(batch["ids"][:, :4].float()), batch["y"])

    loader = DataLoader(Sentences(), batch_size=4, collate_fn=pad)
    found = short_diagnosis(make_trainer(), Text(), train_dataloaders=loader, only=["model"])
    as_it_is, replayed = lengths
    measured = as_it_is[session.WARM_UP_STEPS :]
    kept = len(set(replayed))
    assert 5 <= kept <= 8
    again = replayed[: len(replayed) // kept * kept]
    assert sum(again) / len(again) == pytest.approx(sum(measured) / len(measured), rel=0.05)
    experiments = found.measurements.experiments
    assert experiments.model_per_s > 0


class Closed:
    """Raises on all that is asked of it but the one thing that the step needs."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def to(self, device: Any) -> "Closed":
        return self

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def keys(self) -> Any:
        raise RuntimeError("no keys")

    def __copy__(self) -> Any:
        raise RuntimeError("no copy")

    __deepcopy__ = __iter__ = __getitem__ = __bool__ = None


def test_batch_that_cannot_be_inspected_is_left_out_with_a_reason() -> None:
    class Careful(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch._x).sum()  # type: ignore[no-any-return]

    loader = DataLoader(range(40), batch_size=4, collate_fn=lambda some: Closed(torch.ones(len(some), 4)))  # type: ignore[arg-type]  # a range is a dataset
    found = short_diagnosis(make_trainer(), Careful(), train_dataloaders=loader)
    assert found.stats.steps >= 10
    assert "the unchanged run gave no batch" in dict(found.measurements.experiments.left_out)["model"]


# --- the loader alone ---------------------------------------------------------------------------------------------


def test_data_module_without_a_model_is_diagnosed() -> None:
    data = Data()
    found = diagnose(None, None, data, budget_s=2.0, only=["model", "loader"])
    assert found.bottleneck == "unknown"
    assert found.measurements.experiments.loader_per_s > 0
    assert found.measurements.facts.loader.num_workers == 0
    assert dict(found.measurements.experiments.left_out)["model"] == "no module was given"
    assert data.trainer is None


def test_ctrl_c_in_the_loader_keeps_the_earlier_measurements(tmp_path: Path) -> None:
    data = Data(Numbers(fail_at=600, error=KeyboardInterrupt))
    with pytest.raises(DiagnosisInterrupted) as stop:
        short_diagnosis(make_trainer(), Module(), data, only=["model", "loader"], out=tmp_path)
    assert stop.value.diagnosis.measurements.experiments.model_per_s > 0
    assert tmp_path / "feed_report.json" in stop.value.written
    read = read_document(tmp_path)
    assert read.diagnosis.measurements.experiments is not None
    assert read.diagnosis.measurements.experiments.model_per_s is not None


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["speed"]}, "give a list of any of model, loader"),
        ({"only": ()}, "give a list of any of"),
        ({"budget_s": 0}, "budget_s=0"),
        ({"train_dataloaders": [1]}, "not both"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        short_diagnosis(make_trainer(), Module(), Data(), **options)


def test_running_trainer_is_refused() -> None:
    said = []

    class Asks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with pytest.raises(SettingsError, match="This Trainer is running"):
                diagnose(trainer, pl_module)
            said.append(True)

    make_trainer(callbacks=[Asks()]).fit(Module(), datamodule=Data())
    assert said


def test_sharded_model_is_refused() -> None:
    trainer = make_trainer()
    trainer.strategy.__class__ = type("FSDPStrategy", (type(trainer.strategy),), {})
    with pytest.raises(SettingsError, match="divides the model among devices"):
        short_diagnosis(trainer, Module(), Data())


# --- the pace -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "rate"), [(1, 100.0), (2, 100.0)])
def test_pace_ignores_temporarily_slow_steps(accumulate: int, rate: float) -> None:
    pace = Pace(torch.device("cpu"))
    steps_ms = [500] * 20 + [5, 15] * 20 + [60] * 10 + [5, 15] * 25  # the start, then with ten slow ones in the middle
    now = 0.0
    for ms in steps_ms:
        now += ms / 1e3
        pace._stamps.append(now)
    assert pace.per_s(accumulate) == pytest.approx(rate, rel=0.05)
    pace._stamps = pace._stamps[: 4 * accumulate]
    assert pace.per_s(accumulate) is None


@pytest.mark.parametrize("accumulate", [1, 2])
def test_pace_counts_all_replayed_batches_equally_often(accumulate: int) -> None:
    pace, now = Pace(torch.device("cpu")), 0.0
    for step in range(4 * 6):
        now += (0.1, 0.1, 0.1, 0.5)[step % 4]
        pace._stamps.append(now)
    assert pace.per_s(accumulate, 4) == pytest.approx(1 / 0.2)
    pace._stamps = pace._stamps[:9]
    assert pace.per_s(accumulate, 4) is None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """A device with events that is far behind the host; the fits' time limits go by the same clock."""
    fake = SimulatedDevice()
    monkeypatch.setattr(batches, "event_maker", lambda _: fake.event)
    for module in (batches, session):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: fake.now * 1e-9))
    return fake


def test_pace_equals_the_device_rate_when_the_host_runs_ahead(late: SimulatedDevice) -> None:
    pace = Pace(torch.device("cpu"))
    began = late.now
    for step in range(100):
        late.launch(50)
        late.host(1)
        pace.stamp()
        assert late.now - began >= (step - batches.STEPS_AHEAD) * 50 * 1e6
        assert late.compute.free_at > late.now, "the device has run out of work"
    assert pace.per_s(1) == pytest.approx(20)


@pytest.mark.parametrize("on_device", [True, False], ids=["on the device", "from the host"])
def test_replay_on_a_device_keeps_its_time_limit(on_device: bool, late: SimulatedDevice) -> None:
    class Queued(Module):  # type: ignore[misc,valid-type]
        """As with CUDA graphs: a step is queued in no time at all."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            late.launch(50)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer()
    queued = Session(trainer, Queued(), loaders=DataLoader(Numbers(), batch_size=4), package=package_of(trainer))
    queued.train_loaders = queued.loaders
    began = late.now
    limits = FitLength(min_steps=20, max_steps=300, seconds=2)
    batch = next(iter(queued.loaders))
    assert replay(queued, [batch], limits, on_device=on_device) == pytest.approx(20)
    assert (late.compute.free_at - began) / 1e9 == pytest.approx(2, abs=0.05 * (batches.STEPS_AHEAD + 2))
