"""What users of DaliDataModule get wrong: each is said, with what to do."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import LightningDataModule
from PIL import Image
from recording import Recording, quiet_trainer

from lightning_feed import FastDataModule
from lightning_feed.errors import DatasetError, LoaderError, MissingExtraError, SettingsError

pytest.importorskip("nvidia.dali")

from dali_numbers import DaliNumbers, Defined, decoded, write_files
from nvidia.dali import Pipeline, fn, pipeline_def

from lightning_feed.data.dali import DaliDataModule
from lightning_feed.load.dali.binding import DaliOptions

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
    with pytest.raises(LoaderError, match="closed before its end: by an error"):
        next(batches)  # and not the end of the epoch
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


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_forgotten_return(split: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, 4)

    def define(module: DaliDataModule) -> None:
        fn.readers.file(files=files, **module.reader())

    with pytest.raises(DatasetError, match=rf"pipeline\('{split}'\) made a reader and returned nothing"):
        getattr(Defined(define), f"{split}_dataloader")()


def made_with_pipeline_def(module: DaliDataModule, files: list[str]) -> Any:
    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def define() -> Any:
        return fn.readers.file(files=files, **module.reader())

    return define()


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
        (
            lambda module, files: fn.readers.file(files=files, **{**module.reader(), "num_shards": 7}),
            "DALI said:.*input samples: 4, .* number of shards: 7",
        ),
        (lambda module, files: fn.random.uniform(range=(0.0, 1.0)), "has no reader"),
        (
            lambda module, files: (
                fn.readers.file(files=files, **module.reader())[1],
                fn.readers.file(files=files[1:], **module.reader("others"))[1],
            ),
            "does not go in step",
        ),
        (
            lambda module, files: [fn.readers.file(files=files, **module.reader("a"))[1] for _ in range(2)],
            "DALI said:.*non-unique names:.*'a'",
        ),
        (
            lambda module, files: fn.readers.file(file_root="/no/such", **module.reader()),
            "Where there is no such split, return None.*/no/such",
        ),
        (
            lambda module, files: fn.copy(fn.readers.file(files=files, **module.reader())[1].gpu()),
            r"device=self\.decoder_device.*GPU",
        ),
        (lambda module, files: made_with_pipeline_def(module, files), "leave @pipeline_def"),
    ],
)
def test_pipelines_that_are_wrong(define: Any, said: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, 4)
    with pytest.raises(DatasetError, match=f"(?s){said}"):
        len(Defined(lambda module: define(module, files)).train_dataloader())


@pytest.mark.parametrize(
    ("define", "said"),
    [
        (
            lambda module, files: fn.readers.file(files=[], **module.reader()),
            r"DALI cannot build what Defined\.pipeline\('train'\) makes\. .*DALI said:.*readers\.file.*empty list",
        ),
        (
            lambda module, files: fn.reinterpret(fn.readers.file(files=files, **module.reader())[1], shape=[7]),
            r"batch of Defined\.pipeline\('train'\).*DALI said:.*reinterpret.*Requested shape:\s7",
        ),
        (
            lambda module, files: (
                fn.readers.file(files=files, **module.reader())[1],
                fn.experimental.inputs.video(sequence_length=2, name="mine"),
            ),
            r"resumable=False\).*DALI said:.*Checkpointing is not implemented for this operator",
        ),
    ],
)
def test_what_dali_says_is_shown_with_the_split(define: Any, said: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, 4)
    with pytest.raises(DatasetError, match=f"(?s){said}"):
        list(Defined(lambda module: define(module, files)).train_dataloader())


def test_an_error_in_a_function_of_ones_own(tmp_path: Path) -> None:
    def fails(sample: Any) -> Any:
        raise KeyError("no such bird")

    def define(module: DaliDataModule) -> Any:
        return fn.python_function(fn.readers.file(files=write_files(tmp_path, 4), **module.reader())[1], function=fails)

    with pytest.raises(DatasetError, match=r"(?s)python_function.*no such bird"):
        list(Defined(define).train_dataloader())


def test_errors_while_a_pipeline_is_defined_stay_what_they_are(class_folders: Path) -> None:
    def define(module: Any) -> Any:
        jpegs, _ = fn.readers.file(file_root=str(class_folders), **module.reader())
        return fn.resize(fn.decoders.image(jpegs), sizes=(8, 8))

    with pytest.raises(KeyError, match="sizes"):
        len(Defined(define).train_dataloader())


def generated() -> Iterator[Any]:
    while True:
        yield [np.zeros(1)] * 4


SOURCES: dict[str, Callable[[], Any]] = {
    "generator function": lambda: generated,
    "generator": generated,
    "list": lambda: [[np.zeros(1)] * 4] * 2,
    "callable": lambda: lambda: [np.zeros(1)] * 4,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources_that_would_begin_again_with_a_resumed_run(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind]

    def define(module: DaliDataModule) -> Any:
        _, labels = fn.readers.file(files=write_files(tmp_path, 8), **module.reader())
        return labels, fn.external_source(source(), batch=True)

    said = (
        r"^The source of fn\.external_source in Defined\.pipeline\('train'\) keeps no place\. .*Info.*resumable=False"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as users may have it
        with pytest.raises(DatasetError, match=said) as caught:
            len(Defined(define).train_dataloader())
    assert isinstance(caught.value.__cause__, UserWarning)
    for loader in (Defined(define, resumable=False).train_dataloader(), Defined(define).val_dataloader()):
        assert len(list(loader)) == 2  # nothing is resumed there


def test_another_warning_of_a_build_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes the way of warnings: here to an error, as in all these tests."""
    monkeypatch.setattr(Pipeline, "build", lambda pipeline: warnings.warn("Something else", stacklevel=1))
    with pytest.raises(UserWarning, match="Something else"):
        len(DaliNumbers(tmp_path).train_dataloader())


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
    with pytest.raises(SettingsError, match=r"needs an NVIDIA GPU, and this run is on 'cpu'|a DALI of torch's CUDA"):
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
    assert module._dali.loaders == {}


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


def test_wrapping_a_module_that_loads_with_dali(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"DaliNumbers loads with DALI already.*DaliOptions\(threads"):
        FastDataModule.wrap(DaliNumbers(tmp_path))


def test_wrapping_a_module_that_gives_a_dali_loader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Gives(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

    loader = DaliNumbers(tmp_path).train_dataloader()
    assert FastDataModule.wrap(Gives()).train_dataloader() is loader
    assert "left as it is. DALI loads in threads of its own: set num_threads" in caplog.text


def test_in_both_packages(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning import LightningDataModule

    from lightning_feed.data.dali import FeedDali

    class Module(FeedDali, LightningDataModule):
        def pipeline(self, split: str) -> Any:
            return fn.readers.file(files=write_files(tmp_path, 4), **self.reader())

    assert len(Module(2).train_dataloader()) == 2


def labelled(files: list[str], labels: list[Any]) -> DaliDataModule:
    return Defined(lambda module: fn.readers.file(files=files, labels=labels, **module.reader(shuffle=False)))


@pytest.mark.parametrize("label", [1.5, 2**31, -(2**31) - 1])
def test_a_label_that_dali_would_change(label: Any, tmp_path: Path) -> None:
    module = labelled(write_files(tmp_path, 4), [0, 1, 2, label])
    with pytest.raises(
        DatasetError, match=rf"pipeline\('train'\): labels\[3\]={label} is not a whole number of 32 bits"
    ):
        module.train_dataloader().share  # noqa: B018  # builds the pipeline


@pytest.mark.parametrize(
    "labels", [[7, -3, 2**31 - 1, -(2**31)], [7.0, -3.0, 1.0, 0.0], ["7", "-3", "1", "0"], list(np.arange(4))]
)
def test_labels_that_dali_keeps(labels: list[Any], tmp_path: Path) -> None:
    (_, found), *_ = labelled(write_files(tmp_path, 4), labels).train_dataloader()
    assert found.flatten().tolist() == [int(label) for label in labels]
