"""The experiments that need a loader only, one after the other: their names, their order and their time."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_feed.diagnosing import disk, functions, rates, transforms
from lightning_feed.diagnosing.session import LeftOut, Session
from lightning_feed.errors import FeedError
from lightning_feed.measure.experiment_results import ExperimentResults

_LEAST_S = 0.3
"""A share is never smaller; with less time left, an experiment is not begun."""


@dataclass(frozen=True)
class Experiment:
    """One of them."""

    what: str
    """A few words for the progress bar."""
    measure: Callable[[Session], None]
    """Puts figures among the session's results, or raises LeftOut."""
    weight: float
    """Its part of the time."""


EXPERIMENTS = {
    "loader": Experiment("the loader alone, as configured", rates.measure_loader, 4.0),
    "keys": Experiment("bytes of each part of a batch", rates.measure_keys, 0.0),
    "disk": Experiment("the files that samples are made of", disk.measure_disk, 0.5),
    "constant-samples": Experiment("constant samples, same workers", rates.measure_ceiling, 1.6),
    "hand-over": Experiment("a ready batch, from worker to training", rates.measure_hand_over, 0.4),
    "transforms": Experiment("reading, decoding and each transform", transforms.measure_costs, 1.3),
    "functions": Experiment("your functions, by time", functions.measure_functions, 0.7),
    "no-transforms": Experiment("transforms left out", transforms.measure_without_transforms, 1.0),
    "uint8": Experiment("pixel work left to the device", transforms.measure_as_uint8, 1.0),
    "device-decode": Experiment("decoding on the device", rates.measure_device_decode, 0.7),
    "cached-files": Experiment("files in the page cache", disk.measure_cached, 3.0),
    "cold-files": Experiment("files out of the page cache", disk.measure_cold, 3.0),
    "workers": Experiment("other numbers of workers", rates.measure_scaling, 4.0),
    "copies": Experiment("copies to the device", rates.measure_copies, 0.5),
}
"""By name, in the order in which they are made."""
_BUILD_ON_LOADER = {"keys", "disk", "cached-files", "cold-files", "workers", "copies"}
"""Those that need what the loader alone gave."""
_OF_ANY_ITERABLE = {"loader", "keys", "copies"}
"""Those that need no DataLoader."""


def run_data_experiments(
    loader: Any,
    *,
    device: Any = None,
    budget_s: float,
    only: frozenset[str] | None = None,
    on_progress: Callable[[str, float], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ExperimentResults]:
    """Make the experiments one after the other, and give all results so far after each of them.

    The user's loaders, data sets, samplers and all random generators are as before after each ``next()``, also when it
    raises: a KeyboardInterrupt leaves the results that were given before it. Loaders are built anew for each
    experiment; the user's own are never iterated.

    Args:
        loader: what ``train_dataloader`` returned: a DataLoader, a dict or list of them, a CombinedLoader; of any other
            iterable that can be gone through again, the rate alone is measured.
        device: that batches go to; None: none.
        budget_s: for all of them together. One may take a little longer where a single batch does.
        only: names, of :data:`EXPERIMENTS`; None: all. ``loader`` is made for every one that builds on it.
        on_progress: called with the name of the next one and the share of the work that is done, 0 to 1.
        clock: seconds.

    Raises:
        DatasetError: the loader as configured cannot load a sample, with the sample and the worker as far as they can
            be told.
        LoaderError: the loader hangs or is empty.
    """
    names = [name for name in EXPERIMENTS if only is None or name in only]
    if _BUILD_ON_LOADER.intersection(names) and "loader" not in names:
        names.insert(0, "loader")
    session = Session(loader, None if device is None else torch.device(device), clock)
    began = session.clock()
    no_loader = session.prepare()
    for done, name in enumerate(names):
        if on_progress is not None:
            on_progress(name, done / len(names))
        left_s = budget_s - (session.clock() - began)
        weights = sum(EXPERIMENTS[other].weight for other in names[done:]) or 1.0
        session.share_s = max(_LEAST_S, left_s * EXPERIMENTS[name].weight / weights)
        try:
            if no_loader is not None and name not in _OF_ANY_ITERABLE:
                raise LeftOut(no_loader)
            _make(session, name, late=left_s < _LEAST_S)
        except LeftOut as reason:
            session.leave_out(name, str(reason))
        yield session.results
    if on_progress is not None:
        on_progress("", 1.0)


def _make(session: Session, name: str, *, late: bool) -> None:
    if late and name not in ("loader", "keys"):
        raise LeftOut("no time was left for it")
    if name in _BUILD_ON_LOADER and session.alone is None:
        raise LeftOut("it builds on the loader alone, which was not measured")
    try:
        EXPERIMENTS[name].measure(session)
    except FeedError as error:
        if name == "loader":
            raise
        raise LeftOut(str(error)) from error
