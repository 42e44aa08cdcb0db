"""What users of DaliDataModule get wrong: each is said, with what to do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from recording import Recording, quiet_trainer

from lightning_feed.errors import DatasetError, MissingExtraError, SettingsError

pytest.importorskip("nvidia.dali")

from dali_numbers import DaliNumbers, Defined, decoded, write_files
from nvidia.dali import fn

from lightning_feed.dali import DaliDataModule
from lightning_feed.load.dali.options import DaliOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]


def fit(module: DaliDataModule, **options: Any) -> None:
    quiet_trainer([], **options).fit(Recording(), datamodule=module)


def native_threads() -> int:
    """Of the process, with those that Python does not know."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_corrupt_image_is_named(class_folders: Path) -> None:
    bad = class_folders / "dogs" / "3.jpg"
    good = bad.read_bytes()
    bad.write_bytes(good[: len(good) // 2])
    module = Defined(lambda module: {"x": decoded(module, class_folders)[0]}, 2)
    loader = module.train_dataloader()
    batches, threads = iter(loader), native_threads()
    with pytest.raises(DatasetError, match=r"dogs/3\.jpg") as caught:
        list(batches)
    assert caught.value.__cause__ is not None
    assert native_threads() < threads  # the pipeline is gone, though its error is held
    with pytest.raises(RuntimeError, match="ended with DatasetError"):
        next(batches)
    bad.write_bytes(good)
    assert len(list(loader)) == 6  # a pipeline of its own


def test_a_corrupt_image_in_a_validation(class_folders: Path) -> None:
    (class_folders / "cats" / "0.jpg").write_bytes(b"")
    loader = Defined(lambda module: decoded(module, class_folders)).val_dataloader()
    with pytest.raises(DatasetError, match="DALI could not make a batch"):
        list(loader)
    assert not loader.built


def test_ragged_outputs(tmp_path: Path) -> None:
    for index in range(4):
        Image.fromarray(np.zeros((8, 8 + index, 3), np.uint8)).save(tmp_path / f"{index}.png")
    files = [str(file) for file in sorted(tmp_path.iterdir())]
    module = Defined(lambda module: fn.decoders.image(fn.readers.file(files=files, **module.reader())[0]))
    with pytest.raises(DatasetError, match=r"4 shapes.*not one tensor"):
        next(iter(module.train_dataloader()))


def test_no_pipeline() -> None:
    class Empty(DaliDataModule):
        pass

    with pytest.raises(NotImplementedError, match="def pipeline"):
        Empty().train_dataloader()


def test_nothing_to_train_on() -> None:
    with pytest.raises(DatasetError, match="nothing to train on"):
        fit(Defined(lambda module: None))


def test_a_forgotten_return(tmp_path: Path) -> None:
    files = write_files(tmp_path, 4)

    def define(module: DaliDataModule) -> None:
        fn.readers.file(files=files, **module.reader())

    with pytest.raises(DatasetError, match="made a reader and returned nothing"):
        fit(Defined(define))


@pytest.mark.parametrize(
    ("define", "said"),
    [
        (lambda module, files: (*fn.readers.file(files=files, **module.reader()), "label"), "returned a str"),
        (lambda module, files: (), "returned no output"),
        (lambda module, files: fn.readers.file(files=files), "was not told its share"),
        (
            lambda module, files: fn.readers.file(files=files, **{**module.reader(), "num_shards": 2}),
            "was not told its share.*number_of_shards=2",
        ),
        (lambda module, files: fn.random.uniform(range=(0.0, 1.0)), "has no reader"),
        (
            lambda module, files: (
                fn.readers.file(files=files, **module.reader())[1],
                fn.readers.file(files=files[1:], **module.reader("others"))[1],
            ),
            "do not go in step",
        ),
        (lambda module, files: fn.readers.file(files=[], **module.reader()), "empty list"),
        (lambda module, files: fn.readers.file(file_root="/no/such", **module.reader()), "/no/such"),
    ],
)
def test_pipelines_that_are_wrong(define: Any, said: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, 4)
    with pytest.raises(DatasetError, match=said):
        len(Defined(lambda module: define(module, files)).train_dataloader())


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    module = Defined(lambda module: fn.readers.file(file_root=str(tmp_path), **module.reader()))
    with pytest.raises(DatasetError, match="No files found"):
        fit(module)


def test_a_batch_larger_than_the_set_to_drop_from(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="less than one batch of 20"):
        fit(DaliNumbers(tmp_path, 20, last_batch="drop"))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"eval_batch_size": 0},
        {"device": "cuda"},
        {"last_batch": "wrap"},
        {"eval_last_batch": None},
    ],
)
def test_impossible_settings(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(SettingsError, match=f"^{name}="):
        DaliDataModule(**options)


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs an NVIDIA GPU, and this run is on 'cpu'"):
        fit(DaliNumbers(tmp_path, device="gpu"))


def test_reader_outside_of_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Call it in pipeline"):
        DaliNumbers(tmp_path).reader()


def test_options_of_another_door() -> None:
    with pytest.raises(SettingsError, match=r"largest_image=\(8, 8\)\) would have no effect"):
        DaliDataModule(dali=DaliOptions(largest_image=(8, 8)))
    with pytest.raises(SettingsError, match="threads=0"):
        DaliDataModule(dali=DaliOptions(threads=0))


def test_an_error_frees_all(class_folders: Path) -> None:
    (class_folders / "cats" / "0.jpg").write_bytes(b"")
    files = sorted(str(file) for file in class_folders.rglob("*.jpg"))

    def define(module: DaliDataModule) -> Any:
        return fn.decoders.image(fn.readers.file(files=files, **module.reader())[0])

    module = Defined(define, 2)
    trainer = quiet_trainer([])
    with pytest.raises(DatasetError, match="could not make a batch"):
        trainer.fit(Recording(), datamodule=module)
    assert module._dali._loaders == {}


def test_a_source_that_ends_too_early(tmp_path: Path) -> None:
    """The end of a source is not taken for the end of the epoch."""
    files = write_files(tmp_path, 8)

    def define(module: DaliDataModule) -> Any:
        _, labels = fn.readers.file(files=files, **module.reader())
        return labels, fn.external_source([np.zeros((2, 1))], batch=True)

    module = Defined(define, 2, resumable=False)
    with pytest.raises(DatasetError, match="ended before the reader's epoch did"):
        list(module.train_dataloader())


def test_a_stage_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no stage 'train'"):
        DaliNumbers(tmp_path).setup("train")


def test_without_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingExtraError, match="DaliDataModule needs NVIDIA DALI"):
        DaliDataModule()


def test_in_both_packages(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning import LightningDataModule

    from lightning_feed.dali import FeedDali

    class Module(FeedDali, LightningDataModule):
        def pipeline(self, split: str) -> Any:
            return fn.readers.file(files=write_files(tmp_path, 4), **self.reader())

    assert len(Module(2).train_dataloader()) == 2
