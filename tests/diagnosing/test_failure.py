"""An error of the user's code names the worker, the sample and the line, and costs nothing of what was measured."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnosing.small_runs import make_parts, make_trainer, short_diagnosis
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_feed.diagnosing.failures import DiagnosisFailed, in_a_line
from lightning_feed.errors import FeedError
from lightning_feed.report.document import read_document

HERE = Path(__file__).name


class BadPhoto(Dataset[Any]):
    """One of its samples cannot be read, whoever asks and however often."""

    def __init__(self, bad: int, length: int = 80) -> None:
        self.bad, self.length = bad, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise ValueError(f"bad photo {index}")
        return torch.rand(4), torch.tensor(index % 2)


class BadStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (BadPhoto(9)[index] for index in range(80))


def fails(loader: Any, package: str = "lightning.pytorch", **options: Any) -> FeedError:
    Module, _ = make_parts(package)
    with pytest.raises(FeedError) as raised:
        short_diagnosis(make_trainer(package), Module(), train_dataloaders=loader, **options)
    return raised.value


@pytest.mark.parametrize(
    ("order", "workers", "where", "package"),
    [
        ("as they lie", 0, "sample 41", "lightning.pytorch"),
        ("shuffled", 1, "worker 0, sample 41", "pytorch_lightning"),
        ("by a generator of its own", 0, "sample 41", "lightning.pytorch"),
    ],
)
def test_a_sample_that_fails_in_the_run(order: str, workers: int, where: str, package: str) -> None:
    own = torch.Generator().manual_seed(7) if order == "by a generator of its own" else None
    shuffle = order != "as they lie"
    loader = DataLoader(BadPhoto(41), batch_size=4, num_workers=workers, shuffle=shuffle, generator=own)
    error = fails(loader, package)
    assert str(error).startswith(
        f"training as it is failed. Loading from the data set (BadPhoto) failed in {where}: ValueError: bad photo 41. "
        f"Fix or exclude this sample. Raised in {HERE}:"
    )
    assert isinstance(error.__cause__, ValueError)


def test_a_stream_and_a_collate_function() -> None:
    assert "(BadStream) failed: ValueError: bad photo 9." in str(fails(DataLoader(BadStream(), batch_size=4)))

    def collate(samples: Any) -> Any:
        raise TypeError("no batch of that")

    said = str(fails(DataLoader(BadPhoto(-1), batch_size=4, collate_fn=collate)))
    assert "(BadPhoto) failed: TypeError: no batch of that." in said
    assert f"Raised in {HERE}:" in said


def test_an_iterable_that_is_no_dataloader() -> None:
    class Source:
        def __iter__(self) -> Any:
            yield from DataLoader(BadPhoto(9), batch_size=4)

    assert f"training as it is failed: ValueError: bad photo 9 ({HERE}:" in str(fails(Source()))


def test_a_loader_that_a_step_goes_through_is_not_the_training_loader() -> None:
    Module, Data = make_parts()

    class Looks(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            list(DataLoader(BadPhoto(1), batch_size=4))
            return super().training_step(batch, batch_idx)

    with pytest.raises(FeedError, match=r"^training as it is failed: ValueError: bad photo 1 \(test_failure.py:"):
        short_diagnosis(make_trainer(), Looks(), Data())


def test_what_was_measured_before_is_kept(tmp_path: Path) -> None:
    error = fails(DataLoader(BadPhoto(78), batch_size=4), out=tmp_path)
    assert isinstance(error, DiagnosisFailed)
    assert 10 <= error.diagnosis.stats.steps < 20
    assert tmp_path / "feed_report.json" in error.written
    assert read_document(tmp_path).diagnosis.stats == error.diagnosis.stats


# --- no loader ----------------------------------------------------------------------------------------------------


# --- the line -----------------------------------------------------------------------------------------------------


def told(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it is
        return in_a_line(error)
    raise AssertionError("nothing was raised")


def test_the_place_is_in_the_users_code() -> None:
    def parse() -> None:
        json.loads("{")  # raised deep in the standard library

    line = parse.__code__.co_firstlineno + 1
    assert told(parse).endswith(f"({HERE}:{line})")


def test_the_place_in_a_worker_is_in_its_message() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
        f'  File "{sysconfig.get_paths()["purelib"]}/torch/utils/data/_utils/worker.py", line 349, in _worker_loop\n'
        '  File "/elsewhere/birds.py", line 17, in __getitem__\n    raise ValueError("bad photo")\n'
        f'  File "{sysconfig.get_paths()["stdlib"]}/contextlib.py", line 81, in inner\n'
        "ValueError: bad photo\n"
    )
    assert in_a_line(ValueError(text)) == "ValueError: bad photo (birds.py:17)"
