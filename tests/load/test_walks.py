"""Two walks through the package: a number of workers to its DataLoader, and a batch to its training step.

A value passes a file when a function of that file takes it or returns it. ``pytest -s`` prints the files.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from recording import NullStreamPrefetch
from torch.utils.data import DataLoader
from traced_files import PACKAGE, Fed, Model

from lightning_feed import GPUStarvationCallback, LoaderSettings
from lightning_feed.load.recommend import Recommendation
from lightning_feed.load.settings import Setting

WORKERS = 2
BATCH = (5, 4)
"""Shape of a batch. Nothing else in these runs has it."""
MOST_FILES_OF_WORKERS = 6
MOST_FILES_OF_BATCH = 14
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "max_epochs": 1,
}


def is_workers(name: str, value: object) -> bool:
    """Whether a value is the number of workers, or one of the objects whose field it is.

    The memory that so many workers would take is calculated, too (``Footprint``). Nothing goes on to the DataLoader
    from there, so it does not count.
    """
    if isinstance(value, Recommendation):
        value = value.setting
    if isinstance(value, (LoaderSettings, Setting)):
        return value.num_workers == WORKERS
    if isinstance(value, dict):
        return value.get("num_workers") == WORKERS
    return name in ("num_workers", "workers") and value == WORKERS


def is_batch(name: str, value: object) -> bool:
    """Whether a value is the batch, or holds it in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) == BATCH
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(is_batch(name, part) for part in value)


class Walk:
    """The files that a value passes, in their order, until a function is called.

    Args:
        recognizes: called with the name of an argument, empty for a result, and its value.
        end: the function that ends the walk, once it gets the value. None: no function does.
    """

    def __init__(self, recognizes: Callable[[str, object], bool], end: CodeType | None = None) -> None:
        self.recognizes = recognizes
        self.end = end
        self.has_ended = False
        self.files: dict[str, None] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Follow the value in this thread."""
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _note(self, frame: Any, event: str, returned: object) -> None:
        code = frame.f_code
        if self.has_ended or event not in ("call", "return"):
            return
        is_ours = code.co_filename.startswith(str(PACKAGE))
        if not is_ours and code is not self.end:
            return
        values: Mapping[str, object] = {"": returned}
        if event == "call":
            values = frame.f_locals  # at this moment, the arguments
        elif isinstance(returned, tuple):
            values = {f"[{position}]": part for position, part in enumerate(returned)}
        if not any(self.recognizes(name, value) for name, value in values.items()):
            return
        if code is self.end:
            self.has_ended = True
        else:
            self.files[Path(code.co_filename).relative_to(PACKAGE).as_posix()] = None


def show(title: str, files: Mapping[str, None]) -> None:
    sys.stdout.write(f"\n{title}: {len(files)} files\n  " + "\n  ".join(files))


def test_num_workers_passes_through_few_source_files() -> None:
    walk = Walk(is_workers, end=DataLoader.__init__.__code__)
    with walk.taken():
        datamodule = Fed(batch_size=8, loader=LoaderSettings(num_workers=WORKERS))
        Trainer(**QUIET, limit_train_batches=2).fit(Model(), datamodule)
    show("LoaderSettings(num_workers=2) to DataLoader.__init__", walk.files)
    assert walk.has_ended
    assert len(walk.files) <= MOST_FILES_OF_WORKERS


class Steady(Callback):
    """Divides the files of a walk into those before the fifth step, and those of the next three steps."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.before: dict[str, None] = {}
        self.steady: dict[str, None] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.before = dict(self.walk.files)
            self.walk.files.clear()
        if batch_idx == 6:
            self.steady = dict(self.walk.files)


def test_batch_passes_through_few_source_files() -> None:
    walk = Walk(is_batch)
    steps = Steady(walk)
    callbacks = [NullStreamPrefetch(), GPUStarvationCallback(report=False), steps]
    with walk.taken():
        datamodule = Fed(batch_size=BATCH[0], loader=LoaderSettings(num_workers=WORKERS))
        Trainer(**QUIET, callbacks=callbacks).fit(Model(), datamodule)
    show("The first batches to their training steps", steps.before)
    show("A steady batch to its training step", steps.steady)
    assert 0 < len(steps.steady) <= len(steps.before) <= MOST_FILES_OF_BATCH


@pytest.mark.parametrize(
    ("name", "value", "is_seen"),
    [
        ("settings", LoaderSettings(num_workers=WORKERS), True),
        ("setting", Setting(num_workers=WORKERS), True),
        ("options", {"num_workers": WORKERS}, True),
        ("num_workers", WORKERS, True),
        ("depth", WORKERS, False),
        ("settings", LoaderSettings(), False),
    ],
)
def test_is_workers_recognizes_num_workers_in_every_form(name: str, value: object, is_seen: bool) -> None:
    assert is_workers(name, value) is is_seen
