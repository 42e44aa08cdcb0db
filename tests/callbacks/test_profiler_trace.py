"""The trace of a real fit: our stages are there by name, one inside the other, and the fit is the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.profilers import PyTorchProfiler
from torch.utils.data import Dataset

from lightning_feed import FastDataModule, ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.load.stage import PREFIX
from lightning_feed.transfer.prefetcher import SideStream

BATCHES = 6


class CpuPrefetch(PrefetchCallback):
    def open_stream(self, device: torch.device) -> SideStream:
        return SideStream()


class Parts(Dataset[dict[str, torch.Tensor]]):
    """Ten small tensors a sample, so that they are packed."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {str(part): torch.full((3,), float(index + part)) for part in range(10)}


class PartsData(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Parts() if split == "train" else None

    def device_transform(self, batch: Any, split: str) -> Any:
        return {key: value * 2 for key, value in batch.items()}


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first = batch["0"] if isinstance(batch, dict) else batch[0].float().mean(dim=(2, 3))
        loss: torch.Tensor = self.layer(first).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(data: Any, **options: Any) -> list[float]:
    seed_everything(7, verbose=False)
    model = Model()
    quiet: dict[str, Any] = {
        **{"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0},
    }
    Trainer(callbacks=[CpuPrefetch()], **(quiet | options)).fit(model, datamodule=data)
    return model.losses


class Trace:
    """The complete events of an exported Chrome trace."""

    def __init__(self, path: Path) -> None:
        self.events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]

    def named(self, stage: str) -> list[dict[str, Any]]:
        # A device has its own row for what it did on behalf of a stage.
        rows = [event for event in self.events if event["name"] == PREFIX + stage]
        return [event for event in rows if event.get("cat") == "user_annotation"]

    def inside(self, inner: str, outer: str) -> list[bool]:
        """For each ``inner``, whether an ``outer`` of its thread encloses it."""
        return [
            any(
                around["tid"] == each["tid"]
                and around["ts"] <= each["ts"]
                and each["ts"] + each["dur"] <= around["ts"] + around["dur"]
                for around in self.named(outer)
            )
            for each in self.named(inner)
        ]


def trace_of(folder: Path, data: Any, **options: Any) -> Trace:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        fit(data)
    profile.export_chrome_trace(str(folder / "trace.json"))
    return Trace(folder / "trace.json")


IN_MAIN = LoaderSettings(num_workers=0, background=0)


def test_a_trace_nests_the_stages_of_a_batch_on_its_way_to_the_device(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, PartsData(batch_size=4, loader=IN_MAIN))
    assert len(trace.named("device_transform")) == len(trace.named("transfer")) == BATCHES
    assert len(trace.named("device_copy")) == BATCHES
    ahead = BATCHES - 1  # the first batch of an epoch has no step before it
    assert len(trace.named("look_ahead")) == ahead
    assert len(trace.named("hand_over")) == BATCHES
    assert trace.inside("transfer", "look_ahead") == [False] + [True] * ahead
    assert sum(trace.inside("loader_next", "look_ahead")) == ahead
    assert not any(trace.inside("hand_over", "look_ahead"))
    for inner in ("device_copy", "device_transform"):
        assert all(trace.inside(inner, "transfer")), inner
    assert not any(trace.inside("device_transform", "device_copy"))


def test_a_trace_shows_each_image_being_read_decoded_and_augmented(class_folders: Path, tmp_path: Path) -> None:
    data = ImageFolderDataModule(str(class_folders), batch_size=2, image_size=32, decoder="pillow", loader=IN_MAIN)
    trace = trace_of(tmp_path, data)
    samples = len(trace.named("augment"))
    assert samples >= 8
    assert len(trace.named("read")) == len(trace.named("decode")) == samples
    assert all(trace.inside("decode", "augment"))
    assert not any(trace.inside("read", "augment"))
    assert all(trace.inside("augment", "loader_next"))


def test_no_trace_annotations_are_made_without_a_profiler(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = torch.autograd.profiler.record_function

    def note(name: str, *args: Any) -> Any:
        made.append(name)
        return real(name, *args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", note)
    fit(PartsData(batch_size=4, loader=IN_MAIN))
    loader = LoaderSettings(num_workers=2, workers="thread", background=1)
    fit(ImageFolderDataModule(str(class_folders), batch_size=2, image_size=32, decoder="pillow", loader=loader))
    assert [name for name in made if name.startswith(PREFIX)] == []
    with torch.profiler.profile():
        fit(PartsData(batch_size=4, loader=IN_MAIN))
    assert PREFIX + "device_transform" in made


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # as Lightning sets it up for a short fit
def test_lightnings_profiler_shows_our_stages_and_losses_stay_the_same(tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=BATCHES - 1)
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="fit", schedule=schedule)
    losses = fit(PartsData(batch_size=4, loader=IN_MAIN), profiler=profiler)
    assert losses == fit(PartsData(batch_size=4, loader=IN_MAIN))
    assert losses == fit(PartsData(batch_size=4, loader=IN_MAIN), profiler="pytorch", default_root_dir=tmp_path)
    traces = [Trace(path) for path in tmp_path.rglob("*.json")]
    assert traces
    for stage in ("look_ahead", "loader_next", "transfer", "device_transform", "hand_over"):
        assert any(trace.named(stage) for trace in traces), stage
    assert all(all(trace.inside("device_transform", "transfer")) for trace in traces)
