"""The user's functions are named with the time that they take."""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnosing.made_data import Images, Slow, Stream, burn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

import lightning_feed
from lightning_feed.diagnosing.functions import StackTally, time_batches
from lightning_feed.diagnosing.parts import LoaderPart
from lightning_feed.measure.loader_code import is_users

HERE = __file__


class Jitter(torch.nn.Module):
    """Stands for a transform of a library."""

    def forward(self, image: Any) -> Any:
        return image


def line_of(text: str) -> int:
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line and "line_of" not in line)


class Listed(Images):
    """Its transforms are a list, gone through in ``__getitem__``: no attribute leads to them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [v2.Resize(8), v2.GaussianBlur(63), v2.RandomHorizontalFlip()]

    def __getitem__(self, index: int) -> Any:
        image = torch.rand(3, 200, 200)
        image = self.steps[1](image)  # the blur
        return self.steps[0](image), index


def slow_collate(samples: list[Any]) -> Any:
    burn(0.03)  # while it collates
    return default_collate(samples)


def test_slow_transform_called_in_getitem_is_named_with_its_line() -> None:
    stages, functions = time_batches(LoaderPart("", DataLoader(Listed(), batch_size=4)), 0.3)
    dearest = functions[0]
    assert (dearest.name, dearest.file, dearest.calls, dearest.stage) == (
        "Listed.__getitem__",
        HERE,
        "GaussianBlur",
        "samples",
    )
    assert dearest.line == line_of("# the blur")
    assert 0 < dearest.ms_per_batch <= stages["samples"]
    assert stages["samples"] > stages["collate"]


def test_time_in_collate_fn_counts_as_the_collate_stage() -> None:
    stages, functions = time_batches(LoaderPart("", DataLoader(Images(), batch_size=4, collate_fn=slow_collate)), 0.3)
    assert stages["collate"] > stages["samples"]
    assert {one.stage for one in functions} == {"collate"}
    assert functions[0].name == "burn"  # of the user's too, and further in


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": None}, {"batch_size": 4, "num_workers": 1}])
@pytest.mark.parametrize("kind", [Images, Stream])
def test_functions_are_timed_for_every_kind_of_loader(
    kind: Callable[..., Dataset[Any]], options: dict[str, Any]
) -> None:
    dataset: Any = kind(Slow(0.005))
    random, interval = torch.get_rng_state(), sys.getswitchinterval()
    stages, functions = time_batches(LoaderPart("", DataLoader(dataset, **options)), 0.2)
    assert stages["samples"] >= 5.0
    assert functions[0].name == "burn"
    assert torch.equal(random, torch.get_rng_state())
    assert sys.getswitchinterval() == interval


class Empty(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Failing(Images):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("label")


def frames_of(call: Callable[[Callable[..., Any]], Any]) -> Any:
    """The stack at the place where ``call`` calls what it is given."""
    found = []
    call(lambda *given: found.append(sys._getframe(1)))
    return found[0]


def test_time_is_assigned_to_the_innermost_user_function() -> None:
    class Aug:
        def run(self, note: Callable[..., Any]) -> None:
            note()

    class Library(dict):  # type: ignore[type-arg]
        def __missing__(self, key: str) -> Any:
            return key

    def in_a_library(note: Callable[..., Any]) -> None:
        note_module = torch.nn.Module()
        note_module.forward = lambda: note(0)  # type: ignore[method-assign]
        note_module()

    tally = StackTally()
    tally.enter("samples", 10.0)
    tally.clear()
    tally.add(frames_of(Aug().run), 13.0)
    tally.add(None, 14.0)  # the thread is gone
    tally.enter("collate", 18.0)
    tally.add(frames_of(in_a_library), 20.0)
    tally.enter("samples", 20.0)
    stages, found = tally.result(batches=2)
    assert stages == {"samples": 4000, "collate": 1000}
    assert [(one.name, one.calls, one.stage, one.ms_per_batch) for one in found] == [
        ("Aug.run", None, "samples", 3000),  # 3 of 4 seconds that were seen
        ("<lambda>", None, "collate", 1000),
    ]
    tally.enter("samples", 60.0)
    assert [one.name for one in tally.result(batches=2)[1]] == ["Aug.run"]  # the other takes too little


def test_user_files_are_told_apart_from_library_files() -> None:
    assert is_users(HERE)
    assert is_users("<ipython-input-3-ab>")
    for library in (torch.nn.modules.module.__file__, sys.modules["threading"].__file__, "<frozen importlib>"):
        assert not is_users(str(library))
    ours = Path(lightning_feed.__file__).parent
    assert not is_users(f"{ours}/cli.py")
    assert is_users(f"{ours}_runs/train.py")
    assert is_users(f"{ours}/demo.py")  # its loader is to be named with its line


@pytest.mark.parametrize("project", ["src/app/train.py", "train.py", "share/birds/1.jpg"])
def test_project_files_below_sys_prefix_count_as_user_files(project: str) -> None:
    """As in an image whose Python is in /usr and whose project is in /usr/src/app."""
    assert is_users(f"{sys.prefix}/{project}")
    assert not is_users(f"{sysconfig.get_paths()['purelib']}/{project}")
