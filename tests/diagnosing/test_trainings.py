"""What kinds of training can be diagnosed, what of them is kept and left out, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import torch
from diagnosing.small_runs import Numbers, make_parts, make_trainer, short_diagnosis
from lightning.pytorch import Callback
from simulated.device import SimulatedDevice
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from watch.small_fits import CpuPrefetch

from lightning_feed._host.hooks import Wrap
from lightning_feed.diagnosing import diagnose, fits
from lightning_feed.diagnosing import trainer as diagnosing_trainer
from lightning_feed.diagnosing.fits import Bench, _Pace
from lightning_feed.diagnosing.outcomes import DiagnosisInterrupted
from lightning_feed.diagnosing.plan import QUICK_REPLAY_STEPS
from lightning_feed.diagnosing.replay import Replay, own_loaders
from lightning_feed.diagnosing.trainer import Limits, package_of
from lightning_feed.errors import FeedError, SettingsError
from lightning_feed.watch.reports.document import read_document

pytestmark = [
    # The fits around the diagnosis are small on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode"),
]
Module, Data = make_parts()


def results_of(model: Any, data: Any = None, *, trainer: Any = None, **options: Any) -> Any:
    found = short_diagnosis(trainer or make_trainer(), model, data if data or options else Data(), **options)
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


class Greedy(Module):  # type: ignore[misc,valid-type]
    """Takes its batch apart, and writes into the tensors: a second step on the same ones would fail."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch.pop("x"), batch.pop("y")
        y -= 1
        return nn.functional.cross_entropy(self.net(x), y)


class OneCycle(Module):  # type: ignore[misc,valid-type]
    """A schedule that raises when it is stepped past the end of the training that was planned."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        assert self.trainer.estimated_stepping_batches > 0
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_manual_optimization_with_two_optimizers() -> None:
    results = results_of(Manual())
    assert results.model_per_s > 0
    assert results.host_batch_per_s > 0


def test_a_step_that_takes_its_batch_apart() -> None:
    samples = [{"x": torch.randn(4), "y": torch.tensor(1)} for _ in range(16)]
    loader = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]  # a list is a data set
    results = results_of(Greedy(), train_dataloaders=loader)
    assert results.model_per_s > 0
    assert results.host_batch_per_s > 0


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_epochs": None, "max_steps": 7}, {"max_epochs": -1}])
def test_trainings_shorter_than_the_experiments(limits: dict[str, Any]) -> None:
    model = OneCycle() if limits["max_epochs"] != -1 else Module()
    assert results_of(model, trainer=make_trainer(**limits)).model_per_s > 0


def test_accumulation_and_clipping_are_kept() -> None:
    seen = set()

    class Looks(Module):  # type: ignore[misc,valid-type]
        def on_train_start(self) -> None:
            seen.add((self.trainer.accumulate_grad_batches, self.trainer.gradient_clip_val, self.trainer.precision))

    trainer = make_trainer(accumulate_grad_batches=3, gradient_clip_val=0.5, precision="bf16-mixed")
    assert results_of(Looks(), trainer=trainer).model_per_s > 0
    assert seen == {(3, 0.5, "bf16-mixed")}


def test_prefetching_is_kept_with_a_copy_of_the_callback() -> None:
    mine = CpuPrefetch()
    found = short_diagnosis(make_trainer(callbacks=[mine]), Module(), Data())
    assert found.stats.prefetch_active is True
    assert not mine.active
    assert found.measurements.experiments.model_per_s > 0
    assert found.measurements.experiments.host_batch_per_s > 0


def test_callbacks_by_environment_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FEED", "1")
    assert results_of(Module()).model_per_s > 0


def test_several_loaders() -> None:
    class Two(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum(nn.functional.cross_entropy(self.net(x), y) for x, y in batch.values())  # type: ignore[return-value]

    loaders = {"a": DataLoader(Numbers(), batch_size=4), "b": DataLoader(Numbers(8), batch_size=2)}
    results = results_of(Two(), train_dataloaders=loaders, only="X1,X2,X3")
    assert results.model_per_s > 0
    assert results.loader_per_s > 0
    assert {key.name: key.used for key in results.keys} == dict.fromkeys(("a.0", "a.1", "b.0", "b.1"), True)


def test_a_stream() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return ((torch.ones(4), torch.tensor(1)) for _ in range(40))

    loader = DataLoader(Stream(), batch_size=4)
    assert results_of(Module(), train_dataloaders=loader).host_batch_per_s > 0


def test_a_module_with_its_own_loader() -> None:
    class Own(Module):  # type: ignore[misc,valid-type]
        def train_dataloader(self) -> Any:
            return DataLoader(Numbers(), batch_size=4)

    found = short_diagnosis(make_trainer(), Own(), None)
    assert found.measurements.experiments.model_per_s > 0


def test_the_trainers_own_data_module() -> None:
    trainer, model = make_trainer(), Module()
    trainer.fit(model, datamodule=Data())
    assert short_diagnosis(trainer, model).measurements.experiments.model_per_s > 0


def test_a_step_that_fetches_for_itself() -> None:
    class Fetches(Module):  # type: ignore[misc,valid-type]
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    found = short_diagnosis(make_trainer(), Fetches(), Data())
    left_out = dict(found.measurements.experiments.left_out)
    assert "fetches for itself" in left_out["X1"]
    assert "fetches for itself" in left_out["X2"]


def test_the_replay_on_the_device_leaves_the_way_there_out() -> None:
    calls = {"on_after_batch_transfer": 0}

    class Transfers(Data):  # type: ignore[misc,valid-type]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls["on_after_batch_transfer"] += 1
            return batch

    results_of(Module(), Transfers(), only="X1", trainer=make_trainer())
    only_x1 = calls["on_after_batch_transfer"]
    calls["on_after_batch_transfer"] = 0
    results_of(Module(), Transfers(), only="X2", trainer=make_trainer())
    assert calls["on_after_batch_transfer"] == only_x1 + QUICK_REPLAY_STEPS


# --- the loader alone ---------------------------------------------------------------------------------------------


def test_hooks_of_the_diagnosis_itself_are_not_named() -> None:
    found = short_diagnosis(make_trainer(), Module(), Data(), only="X1")
    names = [hook.name for hook in found.measurements.hooks]
    assert not any("ShortFit" in name or "GPUStarvationCallback" in name for name in names)


def test_a_data_module_alone() -> None:
    data = Data()
    found = diagnose(None, None, data, budget_s=4.0, only="X1,X3")
    assert found.bottleneck == "unknown"
    assert found.measurements.experiments.loader_per_s > 0
    assert found.measurements.facts.num_workers == 0
    assert dict(found.measurements.experiments.left_out)["X1"] == "no module was given"
    assert data.stages == []
    assert data.trainer is None


def test_a_loader_that_fails_alone() -> None:
    with pytest.raises(FeedError, match="broken"):
        diagnose(None, None, Data(Numbers(fail_at=5)), budget_s=4.0, only="X3")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_fails_in_the_run(workers: int) -> None:
    loader = DataLoader(Numbers(fail_at=5), batch_size=2, num_workers=workers)
    with pytest.raises(FeedError, match=r"^training as it is failed. .*ValueError: sample is broken") as raised:
        short_diagnosis(make_trainer(), Module(), train_dataloaders=loader)
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_loader_that_fails_after_the_run(tmp_path: Path) -> None:
    found = short_diagnosis(make_trainer(), Module(), Data(Numbers(fail_at=600)), only="X1,X3,X7", out=tmp_path)
    assert found.stats.steps > 10
    left_out = dict(found.measurements.experiments.left_out)
    assert "broken" in left_out["X3"] + left_out.get("X7", "")
    assert found.measurements.experiments.model_per_s > 0


def test_ctrl_c_in_the_loader_gives_the_rest(tmp_path: Path) -> None:
    data = Data(Numbers(fail_at=600, error=KeyboardInterrupt))
    with pytest.raises(DiagnosisInterrupted) as stop:
        short_diagnosis(make_trainer(), Module(), data, only="X1,X3", out=tmp_path)
    assert stop.value.diagnosis.measurements.experiments.model_per_s > 0
    assert tmp_path / "feed_report.json" in stop.value.written
    read = read_document(tmp_path)
    assert read.diagnosis.measurements.experiments is not None
    assert read.diagnosis.measurements.experiments.model_per_s is not None


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "X9"}, "X9 is no experiment"),
        ({"only": ()}, "nothing is no experiment"),
        ({"budget_s": 0}, "budget_s=0"),
        ({"train_dataloaders": [1]}, "not both"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        short_diagnosis(make_trainer(), Module(), Data(), **options)


def test_nothing_to_load_from() -> None:
    for arguments in ((None, None), (make_trainer(), Module())):
        with pytest.raises(SettingsError, match="found no training loader"):
            diagnose(*arguments)


def test_an_iterator_would_be_used_up() -> None:
    iterator = iter([(torch.ones(1, 4), torch.tensor([1]))])
    with pytest.raises(FeedError, match="can be read only once"):
        short_diagnosis(make_trainer(), Module(), train_dataloaders=iterator)
    assert len(list(iterator)) == 1


def test_a_running_trainer() -> None:
    said = []

    class Asks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with pytest.raises(SettingsError, match="This Trainer is running"):
                diagnose(trainer, pl_module)
            said.append(True)

    make_trainer(callbacks=[Asks()]).fit(Module(), datamodule=Data())
    assert said


def test_a_sharded_model() -> None:
    trainer = make_trainer()
    trainer.strategy.__class__ = type("FSDPStrategy", (type(trainer.strategy),), {})
    with pytest.raises(SettingsError, match="divides the model among devices"):
        short_diagnosis(trainer, Module(), Data())


def test_something_that_is_no_trainer() -> None:
    with pytest.raises(SettingsError, match="comes from neither"):
        diagnose(object(), Module(), Data())


# --- the parts ----------------------------------------------------------------------------------------------------


def test_replayed_tensors_are_copied_only_where_a_step_writes_into_them() -> None:
    batch = {"x": torch.ones(2), "names": ["a"]}
    read = iter(Replay([batch], 4))
    next(read)
    second = next(read)
    assert second["x"] is batch["x"]
    assert second is not batch
    assert second["names"] is not batch["names"]
    assert len(list(read)) == 2
    writes = iter(Replay([batch], 3))
    for given in writes:
        given["x"].add_(1)
    assert torch.equal(batch["x"], torch.ones(2))


def test_a_wrap_around_a_wrap_is_its_own() -> None:
    class Owner:
        def say(self) -> list[str]:
            return ["owner"]

    owner = Owner()
    inner = Wrap(owner, "say", lambda original: [*original(), "inner"])
    outer = Wrap(owner, "say", lambda original: [*original(), "outer"])
    assert owner.say() == ["owner", "inner", "outer"]
    outer.undo()
    assert owner.say() == ["owner", "inner"]
    inner.undo()
    assert owner.say() == ["owner"]


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules(whole: bool) -> None:
    class Plain(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    model = Plain()
    compiled: Any = model
    if whole:
        compiled = torch.compile(model, backend="eager")
    else:
        model.net.compile(backend="eager")
    before = set(vars(model))
    found = short_diagnosis(make_trainer(), compiled, Data(), only="X1")
    assert found.measurements.experiments.model_per_s > 0
    assert set(vars(model)) == before


@pytest.mark.parametrize(("accumulate", "rate"), [(1, 100.0), (2, 100.0)])
def test_the_pace_is_not_that_of_a_disturbance(accumulate: int, rate: float) -> None:
    pace = _Pace()
    steps_ms = [500] * 20 + [5, 15] * 20 + [60] * 10 + [5, 15] * 25  # the start, then with ten slow ones in the middle
    now = 0.0
    for ms in steps_ms:
        now += ms / 1e3
        pace._stamps.append(now)
    assert pace.per_s(accumulate) == pytest.approx(rate, rel=0.05)
    pace._stamps = pace._stamps[: 6 * accumulate]
    assert pace.per_s(accumulate) is None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """A device with events that is far behind the host; the fits' time limits go by the same clock."""
    fake = SimulatedDevice()

    def wait() -> None:
        fake.now = max(fake.now, fake.compute.free_at)

    begin = _Pace.begin
    monkeypatch.setattr(_Pace, "begin", lambda pace, _: begin(pace, torch.device("cuda")))
    monkeypatch.setattr(fits, "event_maker", lambda _: fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(diagnosing_trainer, "time", SimpleNamespace(perf_counter=lambda: fake.now * 1e-9))
    return fake


def test_a_rate_is_that_of_the_device_however_far_the_host_is_ahead(late: SimulatedDevice) -> None:
    pace = _Pace()
    pace.begin(torch.device("cuda"))
    began = late.now
    for step in range(100):
        late.launch(50)
        late.host(1)
        pace.stamp()
        assert late.now - began >= (step - fits.STEPS_AHEAD) * 50 * 1e6
        assert late.compute.free_at > late.now, "the device has run out of work"
    assert pace.per_s(1) == pytest.approx(20)
    assert late.now >= late.compute.free_at


@pytest.mark.parametrize("on_device", [True, False], ids=["X1", "X2"])
def test_a_replay_on_a_device_keeps_to_its_time(on_device: bool, late: SimulatedDevice) -> None:
    class Queued(Module):  # type: ignore[misc,valid-type]
        """As with CUDA graphs: a step is queued in no time at all."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            late.launch(50)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer()
    bench = Bench(package_of(trainer), trainer, Queued(), loaders=DataLoader(Numbers(), batch_size=4))
    bench.train_loaders = bench.loaders
    began = late.now
    limits = Limits(least=20, most=300, seconds=2)
    batch = next(iter(bench.loaders))
    per_s = bench.replay([batch], limits, lambda *_: None, on_device=on_device)
    assert per_s == pytest.approx(20)
    assert (late.compute.free_at - began) / 1e9 == pytest.approx(2, abs=0.05 * (fits.STEPS_AHEAD + 2))


def test_own_loaders_of_all_kinds() -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    combined = lightning.pytorch.utilities.CombinedLoader({"a": loader, "b": [1, 2]}, "max_size")
    mine = own_loaders(combined)
    assert mine.iterables["a"] is not loader
    assert combined.iterables["a"] is loader
    assert mine.iterables["a"].dataset is loader.dataset
    assert own_loaders([loader, {"x": loader}])[1]["x"] is not loader
