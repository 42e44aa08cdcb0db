"""ImageFolderDataModule with backend="dali-cpu" in real Trainers: the run of backend="torch", but for the pixels."""

import gc
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dali_batches import active_in
from images.made_images import BROKEN
from PIL import Image
from recording import NullStreamPrefetch, Recording, assert_same_run, quiet_trainer
from resuming import assert_resumes_exactly, run
from torch import nn

import lightning_feed.pl
from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.data.image_run import PassEnds
from lightning_feed.errors import DecodeError
from lightning_feed.images.backends import BackendChoice
from lightning_feed.images.dali_binding import DaliOptions
from lightning_feed.images.dali_decoder import ImagePipeline
from lightning_feed.machine.limits import read_text

pytest.importorskip("nvidia.dali")

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in `LightningModule` but have passed in"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
]

STEP = 1 / 255 / 0.224
"""A step of uint8, in the values that the model gets."""
THREADS = LoaderSettings(num_workers=2, workers="thread")
PROCESSES = LoaderSettings(num_workers=2, workers="process")
HERE = LoaderSettings(num_workers=0)
"""Boxes are then drawn from the random numbers of training, some batches ahead: other ones than without DALI."""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Smooth JPEGs of three sizes in two classes: 14 to train with, 6 to validate and 3 to test with."""
    rng = np.random.default_rng(0)
    sizes = [(60, 80), (90, 50), (64, 64)]
    for split, count in (("train", 7), ("val", 3), ("test", 2)):
        for label, name in enumerate("ab"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(count - (split == "test") * label):
                coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                coarse[..., label] //= 3
                picture = Image.fromarray(coarse).resize(sizes[index % 3], Image.Resampling.BICUBIC)
                picture.save(folder / f"{index}.jpg", quality=95)
    return tmp_path / "photos"


def data(photos: Path, backend: Any = "dali-cpu", **options: Any) -> Any:
    """What ``run`` takes; images of 4 x 4, which is what ``Recording`` computes on."""
    given = {"batch_size": 4, "image_size": 4, "loader": HERE, "decoder": "pillow", **options}
    return lambda: {"datamodule": ImageFolderDataModule(photos, backend=backend, **given)}


def assert_nearly_the_same(ours: list[Any], theirs: list[Any]) -> None:
    """Batches as plain values: the same labels and boxes. Another box, or an image that was not flipped, is far away.

    Images of 4 x 4 pixels are nearly all edge, where DALI repeats the last pixel and torchvision does not.
    """
    assert [labels for _, labels in ours] == [labels for _, labels in theirs]
    for (images, _), (expected, _) in zip(ours, theirs, strict=True):
        off = (torch.tensor(images) - torch.tensor(expected)).abs()
        assert off.max() < 20 * STEP
        assert off.mean() < 4 * STEP


# --- the same run as with torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [THREADS, PROCESSES], ids=["threads", "processes"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_order_boxes_and_flips_match_the_torch_backend_in_every_epoch(photos: Path, loader: LoaderSettings) -> None:
    ours = run(data(photos, loader=loader), [], max_epochs=3)
    theirs = run(data(photos, "torch", loader=loader), [], max_epochs=3)
    assert_nearly_the_same(ours, theirs)
    assert [len(labels) for _, labels in ours] == [4, 4, 4, 2] * 3
    labels = [[label for _, batch in ours[start : start + 4] for label in batch] for start in (0, 4, 8)]
    assert labels[0] != labels[1]


def test_the_dali_backend_reads_in_threads_by_default(photos: Path) -> None:
    module = data(photos, loader=None)()["datamodule"]
    assert module.train_dataloader().workers == "thread"
    assert module.backend_choice.name == "dali-cpu"


def test_batch_structure_dtype_and_layout_match_the_torch_backend(photos: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        batches = []
        for backend in ("torch", "dali-cpu"):
            module = data(photos, backend, dtype=dtype)()["datamodule"]
            raw = next(iter(module.val_dataloader()))
            batches.append((raw, module.device_transform(raw, "val")))
        for theirs, ours in zip(*batches, strict=True):
            assert type(ours) is type(theirs)
            for mine, other in zip(ours, theirs, strict=True):
                assert (mine.dtype, mine.shape, mine.stride(), mine.device) == (
                    other.dtype,
                    other.shape,
                    other.stride(),
                    other.device,
                )


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 2, "num_sanity_val_steps": -1},
        pytest.param({"limit_train_batches": 0.5, "limit_val_batches": 1}, marks=pytest.mark.nightly),
        pytest.param({"val_check_interval": 2, "num_sanity_val_steps": 0}, marks=pytest.mark.nightly),
        {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": -1, "max_steps": 7},
        pytest.param({"overfit_batches": 1}, marks=pytest.mark.nightly),
        pytest.param({"fast_dev_run": 2}, marks=pytest.mark.nightly),
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*overfit_batches.*")
@pytest.mark.filterwarnings("ignore:You are using `.*` with .*")
def test_trainer_limits_act_as_with_the_torch_backend(photos: Path, options: dict[str, Any]) -> None:
    def events(backend: str) -> tuple[list[Any], list[Any], int]:
        torch.manual_seed(0)
        model = Recording()
        trainer = quiet_trainer([], **options)
        module = data(photos, backend, loader=LoaderSettings(num_workers=1, workers="thread", seed=5))()["datamodule"]
        trainer.fit(model, datamodule=module)
        steps = [event for event in model.events if event[0] in ("training_step", "validation_step")]
        return [event[:-1] for event in steps], [event[-1] for event in steps], trainer.global_step

    ours = events("dali-cpu")
    theirs = events("torch")
    assert ours[0] == theirs[0]
    assert ours[2] == theirs[2]
    assert_nearly_the_same(ours[1], theirs[1])


def test_a_data_module_that_chose_dali_gpu_trains_the_same_on_the_cpu(photos: Path) -> None:
    """As after a training on the GPU, with a second Trainer for the CPU: images are normalised there, too."""

    def settled() -> dict[str, Any]:
        given = data(photos, "dali-gpu", loader=THREADS)()
        given["datamodule"]._images_run.backend = BackendChoice("dali-gpu", "there was a GPU")
        return given

    assert run(settled, [], max_epochs=1) == run(data(photos, loader=THREADS), [], max_epochs=1)


def test_prefetching_leaves_a_dali_run_the_same(photos: Path) -> None:
    assert_same_run(data(photos, loader=THREADS), limit_val_batches=1)


# --- resuming, ranks, one process for all -----------------------------------------------------------------------------


@pytest.mark.parametrize(("callbacks", "count"), [(list, 5), (lambda: [NullStreamPrefetch()], 2)])
def test_a_dali_run_resumes_bit_exactly_in_mid_epoch(photos: Path, callbacks: Any, count: int, tmp_path: Path) -> None:
    assert_resumes_exactly(data(photos, loader=THREADS), callbacks, tmp_path / "run.ckpt", count=count, max_epochs=3)


class NotesPipelines(Recording):
    """Notes at each step which pipelines there are."""

    def __init__(self, module: ImageFolderDataModule) -> None:
        super().__init__()
        self.module = [module]
        self.active: list[tuple[str, tuple[str, ...]]] = []

    def note(self, *event: Any) -> None:
        super().note(*event)
        self.active.append((event[0], active_in(self.module[0])))


class Both(ImageFolderDataModule):
    """Predicts on what it tests on."""

    def make_dataset(self, split: str) -> Any:
        return super().make_dataset("test" if split == "predict" else split)


@pytest.mark.parametrize(("limit", "keep"), [(1, False), (None, True)])
def test_evaluation_pipelines_exist_only_during_evaluation_unless_kept(
    photos: Path, limit: int | None, keep: bool
) -> None:
    module = Both(
        photos,
        batch_size=4,
        image_size=4,
        loader=HERE,
        backend=DaliOptions(keep_eval_pipelines=keep),
    )
    model = NotesPipelines(module)
    trainer = quiet_trainer(
        [], limit_val_batches=limit, limit_test_batches=limit, limit_predict_batches=limit, val_check_interval=2
    )
    trainer.fit(model, datamodule=module)
    kept = ("val",) if keep else ()
    training = {active for name, active in model.active if name == "training_step"}
    assert training == {("train", *kept)}
    assert {active for name, active in model.active if name == "validation_step"} == {("train", "val"), ("val",)}
    assert active_in(module) == ()
    for evaluate, split in ((trainer.validate, "val"), (trainer.test, "test"), (trainer.predict, "predict")):
        model.active.clear()
        evaluate(model, datamodule=module)
        steps = [active for name, active in model.active if name.endswith("_step")]
        assert len(steps) >= 1
        assert set(steps) == {(split,)}
        assert active_in(module) == ()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=module)
    assert active_in(module) == ()
    assert sum(isinstance(callback, PassEnds) for callback in trainer.callbacks) == 1


def test_pipelines_are_freed_after_an_error(photos: Path) -> None:
    class Fails(Recording):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ArithmeticError("planted")

    module = data(photos)()["datamodule"]
    with pytest.raises(ArithmeticError, match="planted"):
        quiet_trainer([]).fit(Fails(), datamodule=module)
    assert active_in(module) == ()


def test_pipelines_are_freed_in_pytorch_lightning(photos: Path) -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    active: list[tuple[str, ...]] = []

    class Small(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            active.append(active_in(module))
            return self.layer(batch[0]).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            active.append(active_in(module))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = lightning_feed.pl.ImageFolderDataModule(
        photos, batch_size=4, image_size=4, loader=HERE, backend="dali-cpu"
    )
    pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Small(), datamodule=module)
    training = ("train",)
    validating = ("train", "val")
    assert active == [("val",), *[training] * 4, validating, *[training] * 4, validating]
    assert active_in(module) == ()


# --- broken images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["JPEG cut in the middle", "PNG cut"])
def test_a_broken_image_ends_the_run_with_an_error_that_names_it(photos: Path, broken: str) -> None:
    (photos / "train" / "a" / "3.jpg").write_bytes(BROKEN[broken])
    with pytest.raises(DecodeError, match=r"train/a/3\.jpg \(sample 3\)"):
        run(data(photos, loader=THREADS), [])


@pytest.mark.parametrize(("broken", "on_error"), [("JPEG cut in the middle", "skip"), ("PNG cut", "substitute")])
def test_a_broken_image_is_skipped_or_substituted_as_on_error_says(
    photos: Path, broken: str, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (photos / "train" / "a" / "3.jpg").write_bytes(BROKEN[broken])
    source = data(photos, on_error=on_error)
    made: list[Any] = []
    with caplog.at_level(logging.WARNING):
        ours = run(lambda: made.append(source()) or made[-1], [], max_epochs=3)
    assert [len(labels) for _, labels in ours] == [4, 4, 4, 2] * 3
    assert made[0]["datamodule"].failures() == 3  # once in each epoch
    assert sum("a/3.jpg" in record.getMessage() and "on_error" in record.getMessage() for record in caplog.records) == 3


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_number_of_dali_threads_is_logged(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        data(photos, DaliOptions(threads=3))()["datamodule"].train_dataloader()
    assert "DALI decodes with 3 CPU threads for each pipeline: as requested" in caplog.messages


# --- memory -----------------------------------------------------------------------------------------------------------


def resident_mb() -> float:
    """Of this process (proc(5): the second number, in pages of 4 kB)."""
    gc.collect()
    return int(read_text(Path("/proc/self/statm")).split()[1]) * 4096 / 1e6


def growth_mb(photos: Path, rebuilds: int = 25) -> float:
    module = data(photos, image_size=224, loader=LoaderSettings(num_workers=0, seed=0))()["datamodule"]
    loader = module.val_dataloader()

    def validate() -> None:
        for _ in loader:
            assert loader.decode._pipeline is not None
        assert loader.decode._pipeline is None

    for _ in range(10):
        validate()
    before = resident_mb()
    built = loader.decode.built
    for _ in range(rebuilds):
        validate()
    assert loader.decode.built - built == rebuilds
    return resident_mb() - before


def tell_growth(photos: Path, told: Any) -> None:
    """In a process of its own: in that of the tests, what they left free and did not is larger than what is sought."""
    told.put(growth_mb(photos))
    kept: list[Any] = []
    close = ImagePipeline.close

    def left_behind(self: ImagePipeline) -> None:
        kept.append(self._pipeline)
        close(self)

    ImagePipeline.close = left_behind  # type: ignore[method-assign]
    told.put(growth_mb(photos))
    kept.clear()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.slow
@pytest.mark.xdist_group("forkserver")
def test_pipeline_rebuilds_do_not_leak_memory(photos: Path) -> None:
    """Seen: less than 2 MB; 21 MB where each pipeline is left behind, which is planted to see the bound break."""
    fresh = multiprocessing.get_context("forkserver")
    told = fresh.SimpleQueue()
    process = fresh.Process(target=tell_growth, args=(photos, told))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert told.get() < 5
    assert told.get() > 10
