"""The experiments that need a loader only: X3 to X8, what its batches and its files weigh."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from lightning_feed.errors import SettingsError
from lightning_feed.watch.experiments.data_session import LEAST_S, DataSession
from lightning_feed.watch.experiments.results import ExperimentResults

DATA_EXPERIMENTS = {
    "X3": "the loader alone, as configured",
    "keys": "bytes of each part of a batch",
    "disk": "the files that samples are made of",
    "X7": "constant samples, same workers",
    "X5": "transforms, one by one and left out",
    "X4": "files in the page cache",
    "X6": "files out of the page cache",
    "scaling": "other numbers of workers",
    "X8": "copies to the device",
}
"""Name -> what is done, in the order in which it is done."""

_WEIGHTS = {"X3": 4.0, "disk": 0.5, "X7": 2.0, "X5": 4.0, "X4": 3.0, "X6": 3.0, "scaling": 4.0, "X8": 0.5}
"""How the time is shared out among those that take any."""


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
        only: names, of :data:`DATA_EXPERIMENTS`; None: all. X3 is made for every one that builds on it.
        on_progress: called with a name and the share of the work that is done, 0 to 1, before each.
        clock: seconds.

    Raises:
        SettingsError: for a name that is none, or a budget that is none.
        DatasetError: a sample cannot be loaded, with the sample and the worker as far as they can be told.
        LoaderError: the loader hangs or is empty.
    """
    unknown = sorted((only or frozenset()) - DATA_EXPERIMENTS.keys())
    if unknown or budget_s <= 0:
        raise SettingsError(
            f"only={unknown} is none of {', '.join(DATA_EXPERIMENTS)}."
            if unknown
            else f"budget_s={budget_s}: give a number of seconds above 0."
        )
    asked = [name for name in DATA_EXPERIMENTS if only is None or name in only]
    return _run(DataSession(loader, device, clock), asked, budget_s, on_progress)


def _run(
    session: DataSession, asked: list[str], budget_s: float, on_progress: Callable[[str, float], object] | None
) -> Iterator[ExperimentResults]:
    began = session.clock()
    names = asked if "X3" in asked or set(asked) == {"X7"} or set(asked) == {"X5"} else ["X3", *asked]
    session.prepare(names)
    for done, name in enumerate(names):
        if on_progress is not None:
            on_progress(name, done / len(names))
        left = budget_s - (session.clock() - began)
        weight = _WEIGHTS.get(name, 0.0)
        share = left * weight / (sum(_WEIGHTS.get(other, 0.0) for other in names[done:]) or 1.0)
        session.make(name, max(LEAST_S, share), late=left < LEAST_S)
        yield session.results
    if on_progress is not None:
        on_progress("", 1.0)
