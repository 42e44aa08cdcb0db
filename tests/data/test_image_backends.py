"""backend="nvjpeg" in real Trainers, with the CPU as its device: the runs of backend="torch", to the bit."""

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import in_gate
from images.made_images import WHOLE
from lightning.pytorch import Callback, LightningModule, seed_everything
from made_samples import jpegs
from recording import NullStreamPrefetch, end_workers, quiet_trainer
from resuming import Killed, SaveThenDie
from torch import Tensor, nn

from lightning_feed import GPUStarvationCallback, ImageFolderDataModule, LoaderSettings
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.images import backends

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    # With one worker, on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Of the runs that are resumed in mid-epoch, in other tests told by Lightning as well.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.*barrier.*using the device under current context"),
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes: ten JPEGs each to train on, four and a PNG to validate."""
    for split, count in (("train", 10), ("val", 4)):
        for label, name in enumerate("ab"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index, data in enumerate(jpegs(2 * count)[label::2]):
                (folder / f"{index}.jpg").write_bytes(data)
    (tmp_path / "photos" / "val" / "a" / "other.png").write_bytes(WHOLE["RGB PNG"])
    return tmp_path / "photos"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the backend run without a GPU."""
    monkeypatch.setattr(backends, "GPU_BACKENDS", ())


class Seeing(LightningModule):
    """Trains with dropout, so that stray random draws show, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.events: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._see("training_step", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._see("validation_step", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._see("test_step", batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._see("predict_step", batch, batch_idx)

    def _see(self, name: str, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        assert (images.dtype, images.is_contiguous(memory_format=torch.channels_last)) == (torch.float32, True)
        self.events.append((name, batch_idx, [images.tolist(), labels.tolist()]))
        features = images.mean((2, 3)).to(self.net[0].weight.dtype)
        return nn.functional.cross_entropy(self.net(features), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def made(
    photos: Path,
    backend: Any,
    *,
    loader: dict[str, Any] | None = None,
    kind: type[ImageFolderDataModule] = ImageFolderDataModule,
    **options: Any,
) -> ImageFolderDataModule:
    settings = LoaderSettings(**{"num_workers": 2, "workers": "thread", "seed": 3, **(loader or {})})
    options = {"batch_size": 3, "image_size": 16, "decoder": "pillow", **options}
    return kind(photos, backend=backend, loader=settings, **options)


def fitted(
    module: ImageFolderDataModule,
    callbacks: list[Callback] | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Seeing:
    seed_everything(7, workers=True, verbose=False)
    model = Seeing()
    trainer = quiet_trainer(callbacks or [], **options)
    try:
        trainer.fit(model, datamodule=module, ckpt_path=ckpt_path)
    except Killed:
        end_workers()
    return model


def assert_same_run(ours: Seeing, theirs: Seeing) -> None:
    assert ours.events == theirs.events
    assert len(ours.events) > 4
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


# --- the same run -----------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "in the main process": {"num_workers": 0, "workers": "process"},
    "threads": {},
    "threads, persistent": {"persistent_workers": True},
    "threads, and one behind them": {"background": 2},
    "processes": {"workers": "process"},
    "last batch left out": {"drop_last": True},
}


@pytest.mark.parametrize("kind", in_gate(list(KINDS), ["threads, persistent", "processes", "last batch left out"]))
@pytest.mark.usefixtures("on_cpu")
def test_nvjpeg_batches_and_weights_equal_those_of_the_torch_backend(kind: str, photos: Path) -> None:
    theirs = fitted(made(photos, "torch", loader=KINDS[kind]))
    ours = fitted(made(photos, "nvjpeg", loader=KINDS[kind]))
    assert_same_run(ours, theirs)
    steps = [event[0] for event in ours.events].count("training_step")
    assert steps == 2 * (6 if "drop_last" in KINDS[kind] else 7)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.usefixtures("on_cpu")
def test_true_precisions_train_the_same_as_with_the_torch_backend(precision: Any, photos: Path) -> None:
    """Lightning takes each batch apart for them, before its transfer."""
    theirs, ours = (fitted(made(photos, backend), precision=precision) for backend in ("torch", "nvjpeg"))
    assert_same_run(ours, theirs)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.slow
def test_forkserver_workers_hand_over_complete_encoded_batches(photos: Path) -> None:
    """They get a copy of the data module, which has a backend by then."""
    loader = {"workers": "process", "num_workers": 1, "start_method": "forkserver"}
    module = made(photos, "nvjpeg", loader=loader, batch_size=20, decoder="pillow")
    torch.manual_seed(1)
    ((images, labels),) = module.train_dataloader()
    assert sorted(labels.tolist()) == [0] * 10 + [1] * 10
    assert images.shape == (20, 3, 16, 16)


@pytest.mark.parametrize("quality", ["fast"])
@pytest.mark.usefixtures("on_cpu")
def test_lower_qualities_train_the_same_as_with_the_torch_backend(quality: Any, photos: Path) -> None:
    pytest.importorskip("cv2", reason="the resize of quality='fast'")
    options = {"quality": quality, "decoder": "turbo-region", "image_size": 12}
    theirs = fitted(made(photos, "torch", **options), max_epochs=1)
    assert_same_run(fitted(made(photos, "nvjpeg", **options), max_epochs=1), theirs)


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.usefixtures("on_cpu")
def test_prefetched_nvjpeg_batches_equal_those_of_the_torch_backend(workers: str, photos: Path) -> None:
    theirs = fitted(made(photos, "torch", loader={"workers": workers}))
    prefetch = NullStreamPrefetch()
    ours = fitted(made(photos, "nvjpeg", loader={"workers": workers}), [prefetch])
    assert_same_run(ours, theirs)
    assert prefetch.active


@pytest.mark.usefixtures("on_cpu")
def test_device_transform_gets_each_batch_decoded_once_before_its_step(photos: Path) -> None:
    """With the callback, a batch is decoded while the one before it is trained."""
    order: list[str] = []

    class Watched(ImageFolderDataModule):
        def device_transform(self, batch: Any, split: str) -> Any:
            images, labels = batch  # decoded, as with backend="torch"
            assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
            order.append("decoded")
            return super().device_transform(batch, split)

    class Steps(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            order.append("step")

    loader = LoaderSettings(num_workers=1, workers="thread")
    for callbacks, expected in (([], ["decoded", "step"] * 7), ([NullStreamPrefetch()], None)):
        order.clear()
        module = Watched(photos, batch_size=3, image_size=16, backend="nvjpeg", decoder="pillow", loader=loader)
        fitted(module, [*callbacks, Steps()], max_epochs=1, limit_val_batches=0)
        if expected is None:
            expected = ["decoded", *(["step", "decoded"] * 6), "step"]
        assert order == expected


# --- resumed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "prefetching"), [("threads", True), ("threads, and one behind them", False)])
@pytest.mark.usefixtures("on_cpu")
def test_a_run_resumes_exactly_in_mid_epoch(kind: str, prefetching: bool, photos: Path, tmp_path: Path) -> None:
    def run(*callbacks: Callback, resume: Path | None = None) -> list[Any]:
        ahead = [NullStreamPrefetch()] if prefetching else []
        return trained(fitted(made(photos, "nvjpeg", loader=KINDS[kind]), [*ahead, *callbacks], resume))

    path = tmp_path / "run.ckpt"
    whole = run()
    for count in (2, 9):
        before = run(SaveThenDie("on_train_batch_end", count, path))
        assert len(before) == count + 1
        assert before + run(resume=path) == whole


def trained(model: Seeing) -> list[Any]:
    return [event[2] for event in model.events if event[0] == "training_step"]


# --- beside other callbacks -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
def test_the_starvation_report_describes_the_decoded_nvjpeg_batches(photos: Path) -> None:
    watching = GPUStarvationCallback(every_n_steps=2, report=False)
    fitted(made(photos, "nvjpeg"), [NullStreamPrefetch(), watching])
    facts = watching.report().measurements.facts
    assert facts.loader.batch_size == 3
    assert facts.batch.size_bytes == 3 * 3 * 16 * 16 * 4 + 3 * 8  # what the model gets
    assert facts.loader.workers == "thread"
    assert facts.loader.ours
    assert watching.summary() is not None


# --- without the data module's hooks ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
def test_an_nvjpeg_loader_yields_images_without_its_data_module(photos: Path) -> None:
    module = made(photos, "nvjpeg")
    images, labels = next(iter(module.train_dataloader()))
    assert (images.shape, images.dtype, labels.shape) == ((3, 3, 16, 16), torch.uint8, (3,))
    values, _ = module.device_transform((images, labels), "train")
    assert values.dtype == module.dtype


# --- images that cannot be decoded ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "prefetching"), [(b"no image", False), (None, True)], ids=["a text", "cut short"])
@pytest.mark.usefixtures("on_cpu")
def test_a_broken_image_ends_the_fit_with_an_error_that_names_it(
    data: bytes | None, prefetching: bool, photos: Path
) -> None:
    broken = photos / "train" / "b" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:-200] if data is None else data)
    callbacks: list[Callback] = [NullStreamPrefetch()] if prefetching else []
    with pytest.raises(DatasetError, match=r"b/3\.jpg \(sample 13\): "):
        fitted(made(photos, "nvjpeg"), callbacks)


@pytest.mark.parametrize(("on_error", "workers"), [("skip", "thread"), ("substitute", "process")])
@pytest.mark.usefixtures("on_cpu")
def test_broken_images_are_replaced_and_counted(
    on_error: Any, workers: str, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index, size in ((1, -200), (4, 2)):  # one that only decoding finds broken, and one without a header
        path = photos / "train" / "a" / f"{index}.jpg"
        path.write_bytes(path.read_bytes()[:size])
    module = made(photos, "nvjpeg", on_error=on_error, batch_size=5, loader={"workers": workers})
    with caplog.at_level(logging.WARNING):
        model = fitted(module, max_epochs=1)
    assert [len(labels) for _, labels in trained(model)] == [5] * 4
    assert module.failures() >= 2
    assert workers == "process" or "a/1.jpg" in caplog.text  # which a worker process has to itself


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"transform": lambda image: image}, "cannot call your transform"),
        ({"eval_transform": lambda image: image}, "cannot call your transform"),
        ({"drop_keys": ("label",)}, "nothing to drop"),
        ({"on_device": True}, "no decoded images stay on the device"),
    ],
    ids=["transform", "eval_transform", "drop_keys", "on_device"],
)
@pytest.mark.parametrize("backend", ["nvjpeg", "dali-cpu", "dali-gpu"])
def test_options_that_non_torch_backends_cannot_use_are_refused(
    backend: Any, given: dict[str, Any], words: str, photos: Path
) -> None:
    with pytest.raises(SettingsError, match=words):
        ImageFolderDataModule(photos, backend=backend, **given)


@pytest.mark.parametrize("backend", ["nvjpeg", "dali-cpu", "dali-gpu"])
def test_non_torch_backends_refuse_an_overridden_collate(backend: Any, photos: Path) -> None:
    class Own(ImageFolderDataModule):
        def collate(self, samples: list[Any], split: str) -> Any:
            return super().collate(samples, split)

    with pytest.raises(SettingsError, match="cannot call a collate of yours"):
        Own(photos, backend=backend)
    assert Own(photos).backend == "torch"


def test_an_unknown_backend_is_reported_with_the_valid_ones(photos: Path) -> None:
    with pytest.raises(SettingsError, match=r"backend='cuda'.*'torch', 'nvjpeg', 'dali-cpu', 'dali-gpu'\."):
        ImageFolderDataModule(photos, backend="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["nvjpeg", "dali-gpu"])
def test_a_gpu_backend_without_a_gpu_is_refused_before_training(backend: Any, photos: Path) -> None:
    with pytest.raises(SettingsError, match=rf'backend=.{backend}. decodes on a CUDA device.*backend="torch"'):
        fitted(made(photos, backend))


@pytest.mark.usefixtures("on_cpu")
def test_a_pack_of_decoded_pixels_is_refused_by_the_nvjpeg_backend(photos: Path, tmp_path: Path) -> None:
    pack = importlib.import_module("lightning_feed.storage.packing").pack
    pack(photos / "train", tmp_path / "pack", decoded=True)
    for on_error in ("raise", "skip"):
        with pytest.raises(SettingsError, match="holds pixels"):
            fitted(made(tmp_path / "pack", "nvjpeg", val_fraction=0.0, on_error=on_error))
