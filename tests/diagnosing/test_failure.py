"""An error of the user's code names the worker, the sample and the line, and costs nothing of what was measured."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnosing.small_runs import make_parts, make_trainer, short_diagnosis
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

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


def fails(loader: Any, package: str = "lightning.pytorch", **options: Any) -> FeedError:
    Module, _ = make_parts(package)
    with pytest.raises(FeedError) as raised:
        short_diagnosis(make_trainer(package), Module(), train_dataloaders=loader, **options)
    return raised.value


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_sample_is_reported_with_its_code_location(workers: int) -> None:
    error = fails(DataLoader(BadPhoto(41), batch_size=4, num_workers=workers))
    assert str(error).startswith(f"training as it is failed: ValueError: bad photo 41 ({HERE}:")
    assert isinstance(error.__cause__, ValueError)


def test_failing_collate_fn_is_reported_with_its_code_location() -> None:
    def collate(samples: Any) -> Any:
        raise TypeError("no batch of that")

    said = str(fails(DataLoader(BadPhoto(-1), batch_size=4, collate_fn=collate)))
    assert f"training as it is failed: TypeError: no batch of that ({HERE}:" in said


def test_failing_custom_iterable_is_reported_with_its_code_location() -> None:
    class Source:
        def __iter__(self) -> Any:
            yield from DataLoader(BadPhoto(9), batch_size=4)

    assert f"training as it is failed: ValueError: bad photo 9 ({HERE}:" in str(fails(Source()))


def test_measurements_before_a_failure_are_kept_and_written(tmp_path: Path) -> None:
    error = fails(DataLoader(BadPhoto(78), batch_size=4), out=tmp_path)
    assert isinstance(error, DiagnosisFailed)
    assert 10 <= error.diagnosis.stats.steps < 20
    assert tmp_path / "feed_report.json" in error.written
    assert read_document(tmp_path).diagnosis.stats == error.diagnosis.stats


# --- the line -----------------------------------------------------------------------------------------------------


def told(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it is
        return in_a_line(error)
    raise AssertionError("nothing was raised")


def test_error_location_is_the_line_in_the_users_code() -> None:
    def parse() -> None:
        json.loads("{")  # raised deep in the standard library

    line = parse.__code__.co_firstlineno + 1
    assert told(parse).endswith(f"({HERE}:{line})")


def test_error_location_in_a_worker_is_read_from_its_traceback() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
        f'  File "{sysconfig.get_paths()["purelib"]}/torch/utils/data/_utils/worker.py", line 349, in _worker_loop\n'
        '  File "/elsewhere/birds.py", line 17, in __getitem__\n    raise ValueError("bad photo")\n'
        f'  File "{sysconfig.get_paths()["stdlib"]}/contextlib.py", line 81, in inner\n'
        "ValueError: bad photo\n"
    )
    assert in_a_line(ValueError(text)) == "ValueError: bad photo (birds.py:17)"
