"""What diagnose and tune measure of an image folder is remembered; nothing that goes wrong with that is an error."""

import json
import logging
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_feed import FastDataModule, ImageFolderDataModule, LoaderSettings, diagnose, tune
from lightning_feed.archive import system
from lightning_feed.data.backend_measurements import (
    BackendMeasurement,
    BackendMeasurements,
    measurement_key,
    measurement_of_diagnosis,
    measurement_of_tuning,
)
from lightning_feed.load.trials.search import Tuned
from lightning_feed.load.trials.trial import Setting, Trial
from lightning_feed.tuning import run as tuning
from lightning_feed.watch.experiments.results import ExperimentResults, NamedCost
from lightning_feed.watch.stats import LoaderStats, StarvationStats
from lightning_feed.watch.verdict import decide as tree
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts, Measurements

FOUND = BackendMeasurement(
    backend="torch",
    by="diagnose",
    day="2026-11-21",
    batch_size=64,
    cpu_bound=True,
    starved_pct=60.0,
    samples_per_s=900.0,
)


def _key(root: Path, **changes: Any) -> dict[str, Any]:
    return measurement_key(root, **({"image_size": 224, "quality": "exact", "device": torch.device("cpu")} | changes))


@pytest.fixture
def store(tmp_path: Path) -> BackendMeasurements:
    return BackendMeasurements(tmp_path / "images")


def _file(store: BackendMeasurements) -> Path:
    (file,) = store.folder.iterdir()
    return file


def test_what_was_saved_is_found(store: BackendMeasurements, tmp_path: Path) -> None:
    key = _key(tmp_path)
    assert store.load(key) == ()
    store.save(key, FOUND)
    assert store.load(key) == (FOUND,)
    assert [file.suffix for file in store.folder.iterdir()] == [".json"]


def test_one_for_each_backend_and_command(store: BackendMeasurements, tmp_path: Path) -> None:
    key, others = _key(tmp_path), [replace(FOUND, backend="nvjpeg"), replace(FOUND, by="tune")]
    for one in (FOUND, *others, replace(FOUND, samples_per_s=1000.0)):
        store.save(key, one)
    assert store.load(key) == (*others, replace(FOUND, samples_per_s=1000.0))


@pytest.mark.parametrize("change", [{"image_size": 225}, {"quality": "fast"}, {"device": torch.device("meta")}])
def test_it_holds_for_nothing_else(change: dict[str, Any], store: BackendMeasurements, tmp_path: Path) -> None:
    store.save(_key(tmp_path), FOUND)
    assert store.load(_key(tmp_path, **change)) == ()
    assert store.load(_key(tmp_path / "other")) == ()


def test_another_machine(store: BackendMeasurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(_key(tmp_path), FOUND)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert store.load(_key(tmp_path)) == ()


def test_a_link_is_the_folder_that_it_leads_to(store: BackendMeasurements, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store.save(_key(tmp_path / "real"), FOUND)
    assert store.load(_key(tmp_path / "link")) == (FOUND,)


def test_by_default_it_lies_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert BackendMeasurements().folder == tmp_path / "lightning_feed" / "images"


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: "",
        lambda kept: json.dumps(kept)[:-20],
        lambda kept: "[1, 2]",
        lambda kept: json.dumps({**kept, "version": 99}),
        lambda kept: json.dumps({**kept, "key": {}}),
        lambda kept: json.dumps({**kept, "findings": None}),
        lambda kept: json.dumps({**kept, "findings": [{"backend": "torch"}]}),
    ],
)
def test_a_spoiled_file_is_as_good_as_none(spoil: Any, store: BackendMeasurements, tmp_path: Path) -> None:
    key = _key(tmp_path)
    store.save(key, FOUND)
    file = _file(store)
    file.write_text(spoil(json.loads(file.read_text())))
    assert store.load(key) == ()
    store.save(key, FOUND)
    assert store.load(key) == (FOUND,)


def test_bytes_that_are_no_text(store: BackendMeasurements, tmp_path: Path) -> None:
    store.save(_key(tmp_path), FOUND)
    _file(store).write_bytes(b"\xff\xfe\x00")
    assert store.load(_key(tmp_path)) == ()


def test_what_a_newer_version_adds_is_left_out(store: BackendMeasurements, tmp_path: Path) -> None:
    store.save(_key(tmp_path), FOUND)
    kept = json.loads(_file(store).read_text())
    kept["findings"][0]["new"] = 1
    _file(store).write_text(json.dumps(kept))
    assert store.load(_key(tmp_path)) == (FOUND,)


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = BackendMeasurements(tmp_path / "file" / "images")
    with caplog.at_level(logging.INFO):
        store.save(_key(tmp_path), FOUND)
    (said,) = caplog.messages
    assert "could not be remembered" in said
    assert store.load(_key(tmp_path)) == ()


def test_a_folder_that_cannot_be_written_keeps_what_it_had(
    store: BackendMeasurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(_key(tmp_path), FOUND)

    def refuse(*args: Any, **options: Any) -> Any:  # what mkstemp does in a read-only folder, for root too
        raise PermissionError(13, "Permission denied", str(store.folder))

    monkeypatch.setattr(system.tempfile, "mkstemp", refuse)
    with caplog.at_level(logging.INFO):
        store.save(_key(tmp_path), replace(FOUND, samples_per_s=1.0))
    assert "Permission denied" in caplog.text
    assert store.load(_key(tmp_path)) == (FOUND,)


def test_a_disk_that_is_full_leaves_nothing_behind(
    store: BackendMeasurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(_key(tmp_path), FOUND)

    def full(self: Path, target: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    store.save(_key(tmp_path), replace(FOUND, samples_per_s=1.0))
    assert store.load(_key(tmp_path)) == (FOUND,)
    assert [file.suffix for file in store.folder.iterdir()] == [".json"]


# --- measured by the commands ------------------------------------------------------------------------------------

DAY = "2026-11-21"


def _diagnosis(
    starved: float = 60.0, loaders: dict[str, float] | None = None, steps: int = 400, **facts: Any
) -> Diagnosis:
    """64 images a step of 100 ms, decoded by 8 workers on 8 CPUs that are busy."""
    busy = {"workers_on_cpu_pct": 95.0, "workers_run_queue_pct": 3.0, "workers_blocked_pct": 2.0}
    costs = (NamedCost(name="read", cpu_ms=0.5, wall_ms=1.0), NamedCost(name="decode", cpu_ms=9.0, wall_ms=9.0))
    known = {"num_workers": 8, "usable_cpus": 8, "batch_size": 64, "device_type": "cuda", "decoder": "turbo"}
    stats = StarvationStats(
        steps=steps,
        confidence="high",
        step_ms=100.0,
        compute_ms=100.0 - starved,
        data_idle_ms=starved,
        next_wait_ms=starved,
        starved_pct=starved,
        input_pct=starved,
        other_ms=0.0,
        h2d_ms=0.0,
    )
    return tree.diagnose(
        Measurements(
            stats=stats,
            facts=LoopFacts(**({**known, "backend": "torch", "own_transforms": False, "cache": "off"} | facts)),
            loaders=LoaderStats(**(busy if loaders is None else loaders)),
            experiments=ExperimentResults(
                batch_size=64, loader_per_s=11.0, model_per_s=25.0, device_decode_per_s=100.0, costs=costs
            ),
        )
    )


def test_a_decode_bound_diagnosis() -> None:
    assert measurement_of_diagnosis(_diagnosis(), DAY) == BackendMeasurement(
        backend="torch",
        by="diagnose",
        day=DAY,
        batch_size=64,
        cpu_bound=True,
        starved_pct=60.0,
        samples_per_s=640.0,
        loader_samples_per_s=704.0,
        model_samples_per_s=1600.0,
        device_samples_per_s=6400.0,
        movable_pct=90.0,
        num_workers=8,
        usable_cpus=8,
    )


@pytest.mark.parametrize(
    ("diagnosis", "bound"),
    [
        (_diagnosis(starved=1.0), False),
        (_diagnosis(loaders={"workers_on_cpu_pct": 5.0, "workers_blocked_pct": 95.0, "page_cache_pct": 3.0}), False),
        (_diagnosis(loaders={"workers_run_queue_pct": 60.0}), True),
        (_diagnosis(num_workers=0), True),
    ],
)
def test_bound_by_the_cpus_or_not(diagnosis: Diagnosis, bound: bool) -> None:
    finding = measurement_of_diagnosis(diagnosis, DAY)
    assert finding is not None
    assert finding.cpu_bound is bound


@pytest.mark.parametrize(
    "facts",
    [
        {"decoder": None},
        {"own_transforms": True},
        {"cache": "decoded"},
        {"cache": "device"},
        {"batch_size": None},
        {"steps": 5},
    ],
)
def test_what_says_nothing_about_decoding(facts: dict[str, Any]) -> None:
    assert measurement_of_diagnosis(_diagnosis(**facts), DAY) is None


def test_a_cache_of_bytes_and_another_backend_count() -> None:
    finding = measurement_of_diagnosis(_diagnosis(cache="bytes", backend="nvjpeg"), DAY)
    assert finding is not None
    assert finding.backend == "nvjpeg"


def test_without_experiments_it_is_what_the_run_tells() -> None:
    diagnosis = _diagnosis()
    bare = replace(diagnosis, measurements=replace(diagnosis.measurements, experiments=None))
    finding = measurement_of_diagnosis(bare, DAY)
    assert finding is not None
    assert (finding.samples_per_s, finding.loader_samples_per_s, finding.movable_pct) == (640.0, None, None)


# --- tune -----------------------------------------------------------------------------------------------------------

FOUR = Setting(num_workers=4, prefetch_factor=2)
TUNED = Tuned(
    setting=FOUR,
    reason="",
    trials=(
        Trial(setting=Setting(num_workers=0, prefetch_factor=None), batches_per_s=3.0, cpu_s_per_batch=0.9),
        Trial(setting=FOUR, batches_per_s=10.0, cpu_s_per_batch=0.38),
    ),
    demand_per_s=25.0,
    batch_size=64,
    batches_per_s=10.0,
    starved_pct=60.0,
)
FACTS = LoopFacts(decoder="turbo", backend="torch", cache="off", own_transforms=False)


def _tuned(
    tuned: Tuned = TUNED, facts: LoopFacts = FACTS, *, cpus: float = 4.0, ranks: int = 1
) -> BackendMeasurement | None:
    return measurement_of_tuning(tuned, facts, cpus=cpus, ranks=ranks, day=DAY)


def test_a_tuning_that_cannot_feed_the_model() -> None:
    assert _tuned() == BackendMeasurement(
        backend="torch",
        by="tune",
        day=DAY,
        batch_size=64,
        cpu_bound=True,
        starved_pct=60.0,
        loader_samples_per_s=640.0,
        model_samples_per_s=1600.0,
    )


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"cpus": 4.0}, True),  # 3.8 CPUs at work
        ({"cpus": 8.0}, False),
        ({"cpus": 8.0, "ranks": 2}, True),
        ({"tuned": replace(TUNED, starved_pct=0.0)}, False),
        ({"tuned": replace(TUNED, trials=())}, False),
    ],
)
def test_whether_the_cpus_were_busy_in_the_trial(options: dict[str, Any], bound: bool) -> None:
    finding = _tuned(**options)
    assert finding is not None
    assert finding.cpu_bound is bound


@pytest.mark.parametrize(
    "change", [{"demand_per_s": None, "starved_pct": None}, {"batches_per_s": None}, {"batch_size": None}]
)
def test_a_tuning_that_tells_too_little(change: dict[str, Any]) -> None:
    assert _tuned(replace(TUNED, **change)) is None
    assert _tuned(facts=replace(FACTS, decoder=None)) is None
    assert _tuned(facts=replace(FACTS, own_transforms=True)) is None


# --- by the commands ------------------------------------------------------------------------------------------------


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0].mean((2, 3))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plain(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        pictures, labels = torch.rand(40, 3, 4, 4), torch.zeros(40, dtype=torch.int64)
        return TensorDataset(pictures, labels) if split == "train" else None


def _trainer() -> Trainer:
    with warnings.catch_warnings():
        # Of one CPU for training beside a GPU that is not used: what a machine with one says of these Trainers.
        warnings.filterwarnings("ignore", message="GPU available but not used")
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_epochs=50)


def _birds(root: Path, **options: Any) -> ImageFolderDataModule:
    # Epochs of 11 steps or more, so that as many as a verdict needs count in any case.
    settings = {"batch_size": 1, "val_fraction": 0.01, "image_size": 16, "decoder": "pillow"}
    return ImageFolderDataModule(root, loader=LoaderSettings(num_workers=0), **settings, **options)


def _kept(module: ImageFolderDataModule) -> tuple[BackendMeasurement, ...]:
    return BackendMeasurements().load(module._feed_measurement_key(torch.device("cpu")))


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_diagnose_remembers_and_auto_knows_it_in_the_next_run(backend: Any, class_folders: Path) -> None:
    birds = _birds(class_folders, backend=backend)
    found = diagnose(_trainer(), Small(), birds, budget_s=2, only=("loader",))
    assert found.measurements.facts.backend == "torch"
    (kept,) = _kept(birds)
    assert (kept.backend, kept.by, kept.batch_size) == ("torch", "diagnose", 1)
    assert kept.samples_per_s == pytest.approx(1e3 / found.stats.step_ms)  # type: ignore[operator]
    assert birds.backend_choice is None  # as before
    later = _birds(class_folders, backend="auto")
    later.dataset("train")
    choice = later.backend_choice
    assert choice is not None
    assert choice.name == "torch"
    assert "training is on cpu" in choice.reason
    assert f"lightning-feed diagnose, {kept.day}" in choice.reason


def test_a_backend_that_was_diagnosed_by_name_is_kept_beside_torch(class_folders: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_feed.data.image_backends.GPU_BACKENDS", ())
    for backend in ("torch", "nvjpeg"):
        diagnose(
            _trainer(),
            Small(),
            _birds(class_folders, backend=backend),
            budget_s=2,
            only=("loader", "transforms", "constant-samples"),
        )
    assert {one.backend for one in _kept(_birds(class_folders))} == {"torch", "nvjpeg"}


def test_of_another_data_module_nothing_is_kept() -> None:
    diagnose(
        _trainer(), Small(), Plain(batch_size=2, loader=LoaderSettings(num_workers=0)), budget_s=2, only=("loader",)
    )
    assert not BackendMeasurements().folder.exists()


def test_the_loader_alone_says_nothing(class_folders: Path) -> None:
    birds = _birds(class_folders)
    diagnose(_trainer(), None, birds, budget_s=1, only=("loader",))
    assert _kept(birds) == ()


def test_tune_remembers(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune_loader", lambda loader, goal, **options: replace(TUNED, batch_size=2))
    birds = _birds(class_folders)
    tune(birds, demand_per_s=25.0)
    (kept,) = _kept(birds)
    assert (kept.by, kept.backend, kept.loader_samples_per_s) == ("tune", "torch", 20.0)


def test_tuning_another_data_module_or_a_loader_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune_loader", lambda loader, goal, **options: TUNED)
    module = Plain(batch_size=2, loader=LoaderSettings(num_workers=0))
    tune(module, demand_per_s=25.0)
    tune(module.train_dataloader(), demand_per_s=25.0)
    assert not BackendMeasurements().folder.exists()


def test_diagnose_with_dali(class_folders: Path) -> None:
    """Batches are decoded in all experiments."""
    pytest.importorskip("nvidia.dali")
    birds = ImageFolderDataModule(
        class_folders,
        batch_size=1,
        val_fraction=0.01,  # an epoch of 11 steps or more, so that as many as a verdict needs count in any case
        image_size=16,
        decoder="pillow",
        backend="dali-cpu",
        loader=LoaderSettings(num_workers=1, workers="thread"),
    )
    found = diagnose(_trainer(), Small(), birds, budget_s=3, only=("loader", "transforms", "constant-samples"))
    results = found.measurements.experiments
    assert results is not None
    assert [key.name for key in results.keys] == ["0", "1"]  # images and labels, so the decoder is behind the loader
    assert results.keys[0].bytes_per_batch == 3 * 16 * 16
    assert [cost.name for cost in results.costs] == ["read"]  # what the workers do
    assert results.left_out == (("hand-over", "worker threads hand nothing over"),)
    (kept,) = BackendMeasurements().load(birds._feed_measurement_key(torch.device("cpu")))
    assert (kept.backend, kept.batch_size) == ("dali-cpu", 1)
    assert birds.backend_choice is None
