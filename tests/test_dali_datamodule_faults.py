"""Faults in real files: images that DALI cannot decode are named, and labels that it would change are refused."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recording import Recording, quiet_trainer

from lightning_feed.errors import DatasetError

pytest.importorskip("nvidia.dali")

from dali_numbers import Defined, decoded, write_files
from nvidia.dali import fn

from lightning_feed.load.dali import reader_culprits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
]


def encoded(kind: str, side: int = 64) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def broken_chunk() -> bytes:
    data = bytearray(encoded("PNG"))
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


FAULTS: dict[str, Callable[[], bytes]] = {
    "half.jpg": lambda: encoded("JPEG")[:1500],
    "head.jpg": lambda: encoded("JPEG")[:100],
    "text.jpg": lambda: b"this is no image\n" * 20,
    "zeros.jpg": lambda: bytes(4000),
    "empty.jpg": lambda: b"",
    "chunk.png": broken_chunk,
    "half.png": lambda: encoded("PNG")[:5000],
    "half.bmp": lambda: encoded("BMP")[:5000],
    "half.webp": lambda: encoded("WEBP")[:1000],
}
DECODERS: dict[str, Callable[[Any], Any]] = {
    "image": lambda jpegs: fn.decoders.image(jpegs),
    "crop": lambda jpegs: fn.decoders.image_random_crop(jpegs),
}


def _two_epochs(loader: Any) -> None:
    """A file that goes bad may have been read ahead."""
    for _ in range(2):
        list(loader)


def first_half(error: pytest.ExceptionInfo[DatasetError]) -> str:
    """What is said of the fault, without what to do."""
    return str(error.value).partition("DALI cannot leave")[0]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_cannot_be_decoded_is_named(name: str, decoder: str, class_folders: Path) -> None:
    bad = class_folders / "dogs" / name
    bad.write_bytes(FAULTS[name]())

    def define(module: Any) -> Any:
        jpegs, labels = fn.readers.file(file_root=str(class_folders), **module.reader())
        return fn.resize(DECODERS[decoder](jpegs), size=(8, 8)), labels

    with pytest.raises(DatasetError) as caught:
        list(Defined(define).train_dataloader())
    assert f"dogs/{name}" in first_half(caught)
    assert caught.value.__cause__ is not None


def test_a_header_that_cannot_be_read_is_named(class_folders: Path) -> None:
    (class_folders / "cats" / "text.jpg").write_bytes(FAULTS["text.jpg"]())
    module = Defined(lambda one: fn.peek_image_shape(fn.readers.file(file_root=str(class_folders), **one.reader())[0]))
    with pytest.raises(DatasetError) as caught:
        list(module.train_dataloader())
    assert "cats/text.jpg" in first_half(caught)


def test_each_of_a_batch_is_named_and_none_that_is_good(class_folders: Path) -> None:
    files = [class_folders / "cats" / name for name in ("a.jpg", "b.jpg")]
    for file in files:
        file.write_bytes(b"no image")
    everything = sorted(str(file) for file in class_folders.rglob("*.jpg"))
    first = sorted(everything, key=lambda name: name not in map(str, files))
    module = Defined(lambda one: fn.decoders.image(fn.readers.file(files=first, **one.reader(shuffle=False))[0]))
    with pytest.raises(DatasetError) as caught:
        list(module.train_dataloader())
    named = [file for file in everything if file in first_half(caught)]
    assert sorted(named) == sorted(map(str, files))


@pytest.mark.parametrize("options", [{}, {"resumable": False}])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_file_that_goes_bad_later(epoch: int, options: dict[str, Any], class_folders: Path) -> None:
    """The batch is found by counting, in a shuffled order that changes with the epochs."""
    bad = class_folders / "dogs" / "3.jpg"

    def define(module: Any) -> Any:
        read = fn.readers.file(
            file_root=str(class_folders), initial_fill=5, prefetch_queue_depth=1, dont_use_mmap=True, **module.reader()
        )
        return fn.resize(fn.decoders.image(read[0]), size=(8, 8)), read[1]

    loader = Defined(define, 2, **options).train_dataloader()
    for _ in range(epoch):
        list(loader)
    replacement = class_folders / "new"
    replacement.write_bytes(b"no image")
    replacement.replace(bad)
    with pytest.raises(DatasetError) as caught:
        _two_epochs(loader)
    assert "dogs/3.jpg" in first_half(caught)


def test_a_file_after_a_resume(class_folders: Path) -> None:
    """A resumed pipeline begins in mid-epoch, and the search at the beginning of the readers' way."""
    files = sorted(str(file) for file in class_folders.rglob("*.jpg"))

    def loader() -> Any:
        def define(one: Any) -> Any:
            jpegs, labels = fn.readers.file(files=files, **one.reader())
            return fn.resize(fn.decoders.image(jpegs), size=(8, 8)), labels

        return Defined(define, 2, seed=3).train_dataloader()

    first, resumed = loader(), loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    (_, label), *_ = list(batches)[1:]
    first.close()  # DALI keeps a file mapped while a pipeline has it
    bad = Path(files[int(label[1])])  # in the fifth batch
    bad.unlink()
    bad.write_bytes(b"no image")
    resumed.load_state_dict(state)
    batches = iter(resumed)
    next(batches)
    with pytest.raises(DatasetError) as caught:
        next(batches)
    assert str(bad) in first_half(caught)


def test_of_several_ranks_the_share_is_searched(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (class_folders / "dogs" / "5.jpg").write_bytes(b"no image")
    module = Defined(lambda one: decoded(one, class_folders))
    trainer = quiet_trainer([])
    monkeypatch.setattr(type(trainer), "distributed_sampler_kwargs", property(lambda _: {"rank": 1, "num_replicas": 2}))
    module.trainer = trainer
    with pytest.raises(DatasetError) as caught:
        list(module.train_dataloader())
    assert "dogs/5.jpg" in first_half(caught)


def test_a_search_that_would_be_long_is_not_made(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (class_folders / "dogs" / "5.jpg").write_bytes(b"no image")
    monkeypatch.setattr(reader_culprits, "_LOOKED_THROUGH", 3)
    with pytest.raises(DatasetError) as caught:
        list(Defined(lambda one: decoded(one, class_folders), 4).train_dataloader())
    assert "dogs/5.jpg" not in first_half(caught)
    assert "DALI said" in first_half(caught)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was searched, in vain."""
    made: list[Any] = []
    monkeypatch.setattr(reader_culprits, "_search", lambda *args: made.append(args) or [])
    return made


def test_what_dali_names_is_not_searched(searched: list[Any], class_folders: Path) -> None:
    for name in ("half.jpg", "empty.jpg"):
        bad = class_folders / "dogs" / name
        bad.write_bytes(FAULTS[name]())
        with pytest.raises(DatasetError, match=name):
            list(Defined(lambda one: decoded(one, class_folders)).train_dataloader())
        bad.unlink()
    assert not searched


def test_sources_of_ones_own_are_not_asked_again(searched: list[Any], class_folders: Path) -> None:
    def define(module: Any) -> Any:
        _, labels = fn.readers.file(file_root=str(class_folders), **module.reader())
        bad = fn.external_source(lambda: [np.frombuffer(b"no image", np.uint8)] * 4)
        return fn.resize(fn.decoders.image(bad), size=(8, 8)), labels

    with pytest.raises(DatasetError, match="could not make a batch"):
        list(Defined(define, resumable=False).train_dataloader())
    assert not searched


def test_other_failures_are_not_searched(searched: list[Any], class_folders: Path) -> None:
    def define(one: Any) -> Any:
        images = fn.resize(fn.decoders.image(fn.readers.file(file_root=str(class_folders), **one.reader())[0]), size=8)
        return fn.reinterpret(images, shape=[7, 7, 7])

    with pytest.raises(DatasetError, match="could not make a batch"):
        list(Defined(define).train_dataloader())
    assert not searched


# --- labels -------------------------------------------------------------------------------------------------------


def labelled(files: list[str], labels: Any) -> Defined:
    return Defined(lambda module: fn.readers.file(files=files, labels=labels, **module.reader(shuffle=False)))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, "cat", 3], r"labels\[2\]='cat', of .*002\.bin, is no number\. Number the classes"),
        ([0, None, 2, 3], r"labels\[1\]=None, of .*001\.bin, is no number"),
        ([0, 1, 2, 1.5], r"labels\[3\]=1\.5, of .*003\.bin, is no whole number, and DALI would make 1 of it"),
        ([0, 1, 2, float("nan")], r"labels\[3\]=nan, of .*003\.bin, is no number"),
        ([0, 2**31, 2, 3], r"labels\[1\]=2147483648, of .*001\.bin, is too large"),
        ([-(2**31) - 1, 1, 2, 3], r"labels\[0\]=-2147483649, of .*000\.bin, is too large"),
        (np.arange(4), r"labels\.tolist\(\)"),
        (torch.arange(4), r"labels\.tolist\(\)"),
        ([0, 1], "Provided 2 labels for 4 files"),
    ],
)
def test_labels_that_dali_refuses_or_would_change(labels: Any, said: str, tmp_path: Path) -> None:
    files = write_files(tmp_path, 4)
    with pytest.raises(DatasetError, match=said) as caught:
        quiet_trainer([]).fit(Recording(), datamodule=labelled(files, labels))
    assert "Defined.pipeline('" in str(caught.value)


def test_the_line_of_the_pipeline_is_named(tmp_path: Path) -> None:
    module = labelled(write_files(tmp_path, 2), [0, "cat"])
    with pytest.raises(DatasetError, match=r"called at test_dali_datamodule_faults\.py, line \d+") as caught:
        len(module.train_dataloader())
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "labels",
    [[7, -3, 2**31 - 1, -(2**31)], [7.0, -3.0, 1.0, 0.0], ["7", "-3", "1", "0"], list(np.arange(4)), [True, 2, 3, 4]],
)
def test_labels_that_dali_keeps(labels: list[Any], tmp_path: Path) -> None:
    (_, found), *_ = labelled(write_files(tmp_path, 4), labels).train_dataloader()
    assert found.flatten().tolist() == [int(label) for label in labels]


def listed(folder: Path, *lines: str) -> Defined:
    file_list = folder / "list.txt"
    file_list.write_text("\n".join(lines))
    return Defined(lambda module: fn.readers.file(file_list=str(file_list), **module.reader(shuffle=False)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("001.bin cat", r'list\.txt":2 .*001\.bin cat(.|\n)*number of its class, 0 or more'),
        ("001.bin 1.5", r'list\.txt":2 .*001\.bin 1\.5(.|\n)*number of its class, 0 or more'),
        ("001.bin,1", r'list\.txt":2 .*001\.bin,1(.|\n)*number of its class, 0 or more'),
        ("001.bin", r'list\.txt":2 .*001\.bin(.|\n)*number of its class, 0 or more'),
        ("001.bin 99999999999", r"list\.txt, line 2: the label 99999999999 is too large.*number of its class"),
    ],
)
def test_lists_of_files_with_wrong_labels(line: str, said: str, tmp_path: Path) -> None:
    write_files(tmp_path, 3)
    with pytest.raises(DatasetError, match=said):
        len(listed(tmp_path, "000.bin 0", line, "002.bin 1").train_dataloader())


def test_a_list_of_files(tmp_path: Path) -> None:
    write_files(tmp_path, 3)
    (_, found), *_ = listed(tmp_path, "000.bin 3", "001.bin 2147483647", "", "002.bin 1").train_dataloader()
    assert found.flatten().tolist() == [3, 2**31 - 1, 1]


def test_errors_of_the_pipeline_itself_stay_what_they_are(tmp_path: Path) -> None:
    def define(module: Any) -> Any:
        return fn.readers.file(files=write_files(tmp_path, 2), labels=[int("two"), 1], **module.reader())

    with pytest.raises(ValueError, match="invalid literal") as caught:
        len(Defined(define).train_dataloader())
    assert not isinstance(caught.value, DatasetError)


def test_an_argument_that_there_is_not_is_said_with_its_line(class_folders: Path) -> None:
    def define(module: Any) -> Any:
        jpegs, _ = fn.readers.file(file_root=str(class_folders), **module.reader())
        return fn.resize(fn.decoders.image(jpegs), sizes=(8, 8))

    with pytest.raises(DatasetError, match=r"called at test_dali_.*, line \d+: DALI said: .*sizes"):
        len(Defined(define).train_dataloader())
