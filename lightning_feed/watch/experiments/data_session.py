"""One experiment on data after the other: made in its share of the time, or left out with the reason."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.machine import read_machine
from lightning_feed.load.rounds import RoundLimits, time_loader
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import iter_is_itself, with_changes
from lightning_feed.watch.experiments.as_uint8 import measure_as_uint8
from lightning_feed.watch.experiments.cached_bytes import measure_cached
from lightning_feed.watch.experiments.cold import measure_cold, why_not_cold
from lightning_feed.watch.experiments.copies import measure_copies, why_no_copies
from lightning_feed.watch.experiments.device_decode import measure_device_decode
from lightning_feed.watch.experiments.disk import disk_facts
from lightning_feed.watch.experiments.functions import MOST_FUNCTIONS, Making, measure_making
from lightning_feed.watch.experiments.hand_over import measure_hand_over
from lightning_feed.watch.experiments.keys import key_bytes, size_of_leaf
from lightning_feed.watch.experiments.loader_alone import Alone, measure_alone, measure_scaling
from lightning_feed.watch.experiments.null_dataset import measure_ceiling
from lightning_feed.watch.experiments.results import ExperimentResults, KeyUse, NamedCost
from lightning_feed.watch.experiments.sample_files import sizes_of
from lightning_feed.watch.experiments.subject import Part, Together, parts_of, record_sample, too_large
from lightning_feed.watch.experiments.subset import Subset, choose, files_of_samples
from lightning_feed.watch.experiments.transform_cost import measure_costs, measure_without_transforms

LEAST_S = 0.3
"""A share is never smaller; with less time left, an experiment is not begun."""
_GIVEN_S = 2.0
"""Loaders are given so long, whatever the share, and twice the time besides that the user's took to start."""
_START_S = 60.0
"""The loader as configured is given so long to give its first batches, whatever the budget: nothing goes without it,
and spawned workers may import for long."""
_FILES_SHARE = 0.25
"""Of free memory, for the files of a subset."""
_SAMPLES_OPENED = 16
_LONG_S = 3.0
"""With less time, handing over is measured once with each sharing strategy."""


class DataSession:
    """Makes one experiment after the other. What one of them learns serves those after it.

    Attributes:
        results: all so far.
        clock: seconds.
    """

    def __init__(self, loader: Any, device: Any, clock: Callable[[], float]) -> None:
        self.results = ExperimentResults()
        self.clock = clock
        self._loader = loader
        self._device = None if device is None else torch.device(device)
        self._machine = read_machine()
        self._parts: tuple[Part, ...] = ()
        self._samples: list[Any] = []
        self._alone: Alone | None = None
        self._subset: Subset | str | None = None

    def prepare(self, names: list[str]) -> None:
        """Look at the loaders, and draw a sample of each."""
        try:
            self._parts = parts_of(self._loader)
            for part in self._parts:
                with untouched(part.loader):
                    with_changes(part.loader)
        except LoaderError as error:
            self._parts = ()
            for name in names:
                if name not in ("X3", "keys", "X8"):
                    self._leave_out(name, str(error))
            return
        self._samples = [record_sample(part) for part in self._parts]
        self.results = replace(self.results, batch_size=sum(part.batch_size for part in self._parts))

    def make(self, name: str, share_s: float, *, late: bool) -> None:
        """One experiment, in its share of the time; or why not. X3 is never too late."""
        if any(name == left_out for left_out, _ in self.results.left_out):
            return
        if late and name not in ("X3", "keys"):
            self._leave_out(name, "no time was left for it")
            return
        if name != "X3" and self._alone is None and name not in ("X5", "X7"):
            self._leave_out(name, "it builds on X3, which was not made")
            return
        steps: dict[str, Callable[[float], str | None]] = {
            "X3": self._x3,
            "keys": self._keys,
            "disk": self._disk,
            "X7": self._x7,
            "X5": self._x5,
            "X4": self._x4,
            "X6": self._x6,
            "scaling": self._scaling,
            "X8": self._x8,
        }
        try:
            reason = steps[name](share_s)
        except FeedError as error:
            if name in ("X3", "X5", "disk") and not isinstance(error, LoaderError):
                raise  # the data set itself fails
            if name == "X3":
                raise
            reason = str(error)
        if reason is not None:
            self._leave_out(name, reason)

    def _leave_out(self, name: str, reason: str) -> None:
        self.results = replace(self.results, left_out=(*self.results.left_out, (name, reason)))

    def _too_large(self) -> str | None:
        return too_large(self._parts, [size_of_leaf(sample) for sample in self._samples], self._machine)

    def _x3(self, share_s: float) -> str | None:
        limits = RoundLimits(min_s=_measure_s(share_s), max_s=max(_START_S, share_s))
        if self._parts:
            reason = self._too_large()
            if reason is not None:
                return reason
            self._alone = measure_alone(self._parts, limits)
        elif not hasattr(self._loader, "__iter__"):
            raise LoaderError(
                f"The training loader is a {type(self._loader).__name__}, which nothing can be taken from. Give a "
                "DataLoader, a dict or list of them, or another iterable."
            )
        elif iter_is_itself(self._loader):
            return f"a {type(self._loader).__name__} can be gone through only once, and training needs it"
        else:
            self._alone = _alone(self._loader, limits)
        rate = self._alone.rate
        workers = all(part.loader.num_workers for part in self._parts)
        self.results = replace(
            self.results,
            loader_per_s=rate.batches_per_s,
            loader_start_s=rate.start_s,
            taking_ms=rate.taking_ms if workers else None,
        )
        if self._parts:
            now = max(part.loader.num_workers for part in self._parts)
            self.results = replace(self.results, worker_scaling=((now, rate.batches_per_s),))
        return None

    def _keys(self, share_s: float) -> str | None:
        keys: list[KeyUse] = []
        for number, batch in enumerate(self._first()):
            place = self._parts[number].name if self._parts else ""
            for name, size in key_bytes(batch).items():
                keys.append(KeyUse(name=f"{place}.{name}" if place else name, bytes_per_batch=size, used=None))
        self.results = replace(self.results, keys=tuple(keys))
        return None

    def _disk(self, share_s: float) -> str | None:
        alone = self._known_alone()
        files: list[str] = []
        samples = 0
        for part in self._parts:
            if part.stream:
                return "an iterable data set does not tell which files a sample is made of"
            opened = part.first_samples(_SAMPLES_OPENED)
            files += dict.fromkeys(files_of_samples(part, opened))
            samples += len(opened)
        if not files:
            return "no file was seen to be opened by the samples: they lie in memory, or a library opens them in C"
        sizes = sizes_of(files)
        per_sample = len(files) / max(1, samples)
        # Many samples of one file: files are not opened at the rate of samples.
        of_each = per_sample >= 0.9
        rate = alone.rate.batches_per_s * (self.results.batch_size or 1)
        self.results = replace(
            self.results,
            disk=disk_facts(
                files,
                list(sizes.values()),
                reads=alone.reads,
                files_per_s=rate * per_sample if of_each else None,
            ),
        )
        return None

    def _x7(self, share_s: float) -> str | None:
        reason = self._too_large()
        if reason is None:
            ceiling = measure_ceiling(self._parts, self._samples, self._limits(share_s))
            self.results = replace(self.results, ceiling_per_s=ceiling.batches_per_s)
            self._hand_over(share_s)
        return reason

    def _hand_over(self, share_s: float) -> None:
        found = measure_hand_over(self._parts, self._samples, passes=1 if share_s < _LONG_S else 2)
        if isinstance(found, str):
            self._leave_out("handing batches over", found)
            return
        self.results = replace(
            self.results,
            hand_over_ms=found.ms,
            hand_over_file_system_ms=found.file_system_ms,
            sharing_strategy=found.strategy,
        )

    def _x5(self, share_s: float) -> str | None:
        costs: list[NamedCost] = []
        for part in self._parts:
            for cost in measure_costs(part, share_s / 3 / len(self._parts)):
                costs.append(replace(cost, name=f"{part.name}: {cost.name}") if part.name else cost)
        self.results = replace(self.results, costs=tuple(costs))
        self._making(share_s / 6)
        reason = self._too_large()
        if reason is not None:
            return reason
        free = measure_without_transforms(self._parts, self._limits(share_s / 4))
        if free is not None:
            self.results = replace(self.results, no_transform_per_s=free.batches_per_s)
            small = measure_as_uint8(self._parts, self._limits(share_s / 4))
            self.results = replace(self.results, as_uint8_per_s=None if small is None else small.batches_per_s)
        self._on_the_device(share_s / 6)
        return None

    def _making(self, share_s: float) -> None:
        """Samples and collating, and the user's functions in them."""
        made: list[Making] = []
        for part in self._parts:
            try:
                made.append(measure_making(part, share_s / len(self._parts)))
            except FeedError as error:
                self._leave_out("functions", str(error))
                return
        functions = sorted((one for each in made for one in each.functions), key=lambda one: -one.ms_per_batch)
        self.results = replace(
            self.results,
            samples_ms=sum(each.samples_ms for each in made),
            collate_ms=sum(each.collate_ms for each in made),
            functions=tuple(functions[:MOST_FUNCTIONS]),
        )

    def _on_the_device(self, share_s: float) -> None:
        """What the device itself would decode, where it is one that can."""
        if self._device is None or self._device.type != "cuda":
            return
        try:
            per_s = measure_device_decode(self._parts, self._device, _measure_s(share_s))
        except (FeedError, RuntimeError) as error:  # of nvJPEG, or memory on the device
            self._leave_out("decoding on the device", str(error).partition("\n")[0])
            return
        self.results = replace(self.results, device_decode_per_s=per_s)

    def _x4(self, share_s: float) -> str | None:
        subset = self._chosen(share_s)
        if isinstance(subset, str):
            return subset
        cached = measure_cached(self._parts, subset, self._limits(share_s / 2))
        self.results = replace(self.results, cached_bytes_per_s=cached.batches_per_s)
        return None

    def _x6(self, share_s: float) -> str | None:
        subset = self._chosen(share_s)
        if isinstance(subset, str):
            return subset
        reason = why_not_cold(subset.files)
        if reason is None:
            cold = measure_cold(self._parts, subset, self._limits(share_s))
            self.results = replace(self.results, cold_per_s=cold.batches_per_s)
        return reason

    def _scaling(self, share_s: float) -> str | None:
        deadline = self.clock() + share_s
        rates: dict[int, list[float]] = {now: [rate] for now, rate in self.results.worker_scaling}
        reasons = []
        sizes = [size_of_leaf(sample) for sample in self._samples]
        one = self._limits(max(LEAST_S, share_s / 8))
        for found in measure_scaling(
            self._parts, sizes, self._machine, one, go_on=lambda: self.clock() < deadline - one.min_s
        ):
            if isinstance(found, str):
                reasons.append(found)
                continue
            number, rate = found
            rates.setdefault(number, []).append(rate)
            self.results = replace(
                self.results,
                worker_scaling=tuple((each, median(rates[each])) for each in sorted(rates)),
                worker_spread=tuple((each, min(of), max(of)) for each, of in sorted(rates.items()) if len(of) > 1),
            )
        return "; ".join(reasons) or None

    def _x8(self, share_s: float) -> str | None:
        reason = why_no_copies(self._device)
        if reason is not None or self._device is None:
            return reason
        copies = measure_copies(self._first(), self._device)
        if isinstance(copies, str):
            return copies
        self.results = replace(
            self.results,
            pinned_gb_per_s=copies.pinned_gb_per_s,
            pageable_gb_per_s=copies.pageable_gb_per_s,
            copy_ms=copies.copy_ms,
        )
        return None

    def _limits(self, share_s: float) -> RoundLimits:
        start_s = _START_S if self._alone is None else self._alone.rate.start_s
        return RoundLimits(min_s=_measure_s(share_s), max_s=max(share_s, _GIVEN_S) + 2 * start_s)

    def _first(self) -> list[Any]:
        return self._known_alone().first

    def _known_alone(self) -> Alone:
        assert self._alone is not None, "make() leaves out what builds on X3 without it"
        return self._alone

    def _chosen(self, share_s: float) -> Subset | str:
        """The subset for X4 and X6; the same for both, so that they can be compared."""
        if self._subset is None:
            memory = self._machine.available_memory_bytes
            self._subset = self._too_large() or choose(
                self._parts,
                batches_per_s=self._known_alone().rate.batches_per_s,
                max_s=share_s / 3,
                max_bytes=None if memory is None else int(_FILES_SHARE * memory),
            )
        return self._subset


def _alone(loader: Any, limits: RoundLimits) -> Alone:
    """The rate of an iterable that is no DataLoader."""
    passes: list[Together] = []

    def begin() -> Together:
        passes.append(Together([iter(loader)]))
        return passes[-1]

    with untouched(loader):
        rate = time_loader(begin, burst=1, limits=limits)
    return Alone(rate=rate, first=passes[0].first or [], reads=None)


def _measure_s(share_s: float) -> float:
    return max(0.1, min(3.0, 0.4 * share_s))
