"""Cross-rank starvation: the longest wait in each step, its rank, and its cost for all ranks."""

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_feed.measure.rank_store import default_store, read_all
from lightning_feed.measure.stats import Additive, RankStats, ratio
from lightning_feed.measure.step_meter import StepTimes
from lightning_feed.measure.windows import FEW_STEPS

SLOW_SHARE = 0.1
"""A rank is slow if its mean wait exceeds the median of all ranks' mean waits by at least this share of a step."""
NUMBER, DATA_IDLE, STEP = range(3)
"""Columns of a rank's measurements: number of the step, nanoseconds of waiting for data, nanoseconds of the step."""


def step_rows(steps: Iterable[StepTimes]) -> list[float]:
    """Return the steps that count, as one flat list of (number, data_ns, step_ns)."""
    return [value for step in steps if step.counted for value in (step.number, step.data_ns, step.step_ns)]


def align(ranks: Sequence[Tensor]) -> Tensor:
    """Return the steps that all ranks measured. A rank may lack steps that its device clock has lost, or not yet
    measured.

    Args:
        ranks: each rank's steps as (steps, 3) float64, columns as in :func:`step_rows`.

    Returns:
        (3, ranks, common steps) float64, in the order of the steps' numbers.
    """
    rows = torch.cat(list(ranks))
    counts = torch.tensor([len(steps) for steps in ranks], device="cpu")
    rank = torch.repeat_interleave(torch.arange(len(ranks), device="cpu"), counts)
    numbers, column = torch.unique(rows[:, NUMBER], return_inverse=True)
    grid = torch.full((3, len(ranks), len(numbers)), torch.nan, dtype=torch.float64, device="cpu")
    grid[:, rank, column] = rows.T
    return grid[:, :, ~grid[NUMBER].isnan().any(dim=0)]


@dataclass
class RankSums(Additive):
    """Sums over the steps that all ranks measured. With ``idle[k, r]`` and ``step[k, r]`` for step k on rank r:

    - ``starved_pct = 100 * sum_k max_r idle[k, r] / sum_k max_r step[k, r]``. A rank that waits for data makes the
      others wait for its gradients, and they count that as ``compute``. So the longest wait of each step is the cost
      for all ranks. A mean over ranks would hide one starved rank among many.
    - ``amplification = sum_k max_r idle[k, r] / (1 / ranks * sum_r sum_k idle[k, r])``: the cost for all ranks, divided
      by the mean wait of a rank. It is between 1 (all wait in the same steps, equally long) and the number of ranks (a
      single rank waits in each step). Steps are equally long on ranks that exchange gradients, so this is also
      starved_pct divided by the mean of the ranks' own starved_pct. None if no rank waits.
    - ``slow_rank``: the rank with the longest mean wait, if this wait exceeds the median of the ranks' mean waits by
      10 % of the mean of ``max_r step[k, r]``. For an even number of ranks, the median is the lower of the two middle
      values: the mean of both would halve the difference between two ranks.
    """

    steps: int
    longest_idle_ns: float
    longest_step_ns: float
    idle_ns: Tensor
    """Waiting time of each rank."""

    @classmethod
    def of(cls, common: Tensor) -> "RankSums":
        """Return the sums of the result of :func:`align`."""
        longest_idle, longest_step = common[DATA_IDLE:].amax(dim=1).sum(dim=1).tolist()
        return cls(common.shape[2], longest_idle, longest_step, common[DATA_IDLE].sum(dim=1))

    def stats(self) -> RankStats:
        """Return the figures computed from the sums."""
        idle_ns = self.idle_ns.tolist()
        world_size = len(idle_ns)
        if not self.steps:
            return RankStats(world_size=world_size, steps=0)
        by_rank = [ns / self.steps for ns in idle_ns]
        slow = max(range(world_size), key=by_rank.__getitem__)
        above = by_rank[slow] - sorted(by_rank)[(world_size - 1) // 2]
        longest_ns = self.longest_idle_ns
        step_ns = self.longest_step_ns
        return RankStats(
            world_size=world_size,
            steps=self.steps,
            max_data_ms=longest_ns / self.steps * 1e-6,
            slow_rank=slow if above >= SLOW_SHARE * step_ns / self.steps > 0 else None,
            starved_pct=ratio(100 * longest_ns, step_ns),
            amplification=ratio(longest_ns * world_size, sum(idle_ns)),
            data_ms_by_rank=tuple(ns * 1e-6 for ns in by_rank),
        )


logger = logging.getLogger(__name__)

MOST_STEPS = 4096
"""Largest number of steps sent per window, 98 kB in all; if there are more, only the newest steps are sent."""
PATIENCE_S = 5.0
"""Seconds that rank 0 waits for the other ranks' last steps after training."""
WINDOWS_MISSED = 3
"""Number of windows in a row without the steps of some rank, after which a line is logged."""
_POLL_S = 0.005
_LAST = "last"
_HEADER = 3  # layout, window and number of rows, each as a float64, like the rows
_LAYOUT = 1.0

_sessions = itertools.count()


class RankExchange:
    """One rank's side of the exchange of step times. All ranks send at the same steps; only rank 0 reads.

    A window's keys are used again two windows later, so that the store does not grow. A value counts only if it names
    the requested window, and steps are matched by their numbers. So if ranks are out of step, figures may be missing,
    but are never wrong.

    Args:
        store: torch's ``Store``, the same for all ranks.
        rank: this process's rank.
        world_size: number of ranks.
        session: a name that is the same on all ranks, and differs between fits.
        warm_up: steps at the beginning that :meth:`total` leaves out, if enough others remain.
        sleep: waits for some seconds; called only in :meth:`finish`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        session: int,
        warm_up: int = 0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._prefix = f"lightning_feed/ranks/{session}"
        self._sleep = sleep
        self._windows = 0
        self._missed = 0
        """Windows in a row without the steps of some rank."""
        self._fresh: list[float] = []
        self._sent: list[Tensor] = []
        self._unmatched = [torch.empty(0, 3, dtype=torch.float64, device="cpu")] * world_size
        """For each rank, its steps that are newer than the newest step that all ranks measured."""
        self._warm_up = warm_up
        self._sums = self._settled = RankSums.of(torch.empty(3, world_size, 0, dtype=torch.float64, device="cpu"))
        self._works = True

    def add(self, steps: Iterable[StepTimes]) -> None:
        """Keep ``steps`` for the next :meth:`send`. Needed only if the caller drops these steps before then."""
        self._fresh += step_rows(steps)
        del self._fresh[: -3 * MOST_STEPS]

    def send(self, steps: Iterable[StepTimes] = ()) -> None:
        """End a window: send its steps to rank 0. Returns at once."""
        self.add(steps)
        self._put(str(self._windows % 2))
        self._windows += 1

    def take(self) -> RankStats | None:
        """Return the previous window's figures, on rank 0, after :meth:`send`. Never blocks.

        Returns None on other ranks, after the first window, and if a rank sent nothing or no step was measured by all
        of them.
        """
        if self.rank or not self._works or self._windows < 2:
            return None
        window = self._windows - 2
        return self._gather(window, str(window % 2), self._sent[0])

    def total(self) -> RankStats | None:
        """Return the figures of all windows so far, on rank 0; None on other ranks, and before the first window is
        read.

        The warm-up is left out, unless too few steps would remain.
        """
        sums = self._sums
        if self._settled.steps >= FEW_STEPS:
            sums = self._settled
        if not sums.steps:
            return None
        return sums.stats()

    def finish(self, steps: Iterable[StepTimes] = ()) -> RankStats | None:
        """End the exchange after training: send the last steps; on rank 0, also read the last steps of all ranks.

        Rank 0 waits at most 5 s for ranks that have sent windows before. The exchange cannot be used afterwards.

        Returns:
            :meth:`total`.
        """
        silent = self._missed >= WINDOWS_MISSED
        self.add(steps)
        self._put(_LAST)
        if not self.rank:
            self._await_others(0.0 if silent else PATIENCE_S)
            if self._windows:
                self._gather(self._windows - 1, str((self._windows - 1) % 2), self._sent[0])
            self._gather(self._windows, _LAST, self._sent[-1])
            for slot in ("0", "1", _LAST):
                for key in self._others(slot):
                    self._try(self._store.delete_key, key)
        self._works = False
        return self.total()

    # --- the store ----------------------------------------------------------------------------------------------------

    def _key(self, rank: int, slot: str) -> str:
        return f"{self._prefix}/{rank}/{slot}"

    def _others(self, slot: str) -> list[str]:
        return [self._key(rank, slot) for rank in range(1, self.world_size)]

    def _put(self, slot: str) -> None:
        rows = self._fresh
        self._fresh = []
        if self.rank:
            packed = array("d", (_LAYOUT, self._windows, len(rows) // 3, *rows)).tobytes()
            self._try(self._store.set, self._key(self.rank, slot), packed)
        else:
            mine = torch.tensor(rows, dtype=torch.float64, device="cpu").view(-1, 3)
            self._sent = [*self._sent[-1:], mine]

    def _gather(self, window: int, slot: str, mine: Tensor) -> RankStats | None:
        values: list[bytes] = self._try(self._read, self._others(slot)) or []
        if not self._works:
            return None
        sent = [_unpack(value, window) for value in values]
        rows = [mine, *(steps for steps in sent if steps is not None)]
        if len(rows) < self.world_size:
            self._miss()
            return None
        self._missed = 0
        rows = [torch.cat(both) for both in zip(self._unmatched, rows, strict=True)]
        common = align(rows)
        if not common.shape[2]:
            self._unmatched = [steps[-MOST_STEPS:] for steps in rows]
            return None
        newest = common[NUMBER, 0, -1]
        self._unmatched = [steps[steps[:, NUMBER] > newest] for steps in rows]
        window_sums = RankSums.of(common)
        self._sums += window_sums
        self._settled += RankSums.of(common[:, :, common[NUMBER, 0] > self._warm_up])
        return window_sums.stats()

    def _read(self, keys: list[str]) -> list[bytes] | None:
        """Return the values of all ``keys``; None if a key is missing, because getting a missing key would block."""
        if not self._store.check(keys):
            return None
        return read_all(self._store, keys)

    def _miss(self) -> None:
        self._missed += 1
        if self._missed == WINDOWS_MISSED:
            logger.info(
                "The ranks are not compared: GPUStarvationCallback must be on all ranks, with the same interval."
            )

    def _await_others(self, patience_s: float) -> None:
        for _ in range(round(patience_s / _POLL_S)):
            if self._try(self._store.check, self._others(_LAST)) is not False:
                return
            self._sleep(_POLL_S)

    def _try(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        if not self._works:
            return None
        try:
            return operation(*arguments)
        except RuntimeError as error:  # the store's process or the network is gone; training goes on
            self._works = False
            logger.log(
                logging.INFO if self.rank else logging.WARNING,
                "The ranks are not compared from here on: torch.distributed's store failed (%s).",
                error,
            )
            return None


def open_rank_exchange(*, warm_up: int = 0) -> RankExchange | None:
    """Return the exchange of this process; None with a single rank, or if ``torch.distributed`` has no store.

    Every rank must call this function equally often: the n-th calls of all ranks open one common exchange.

    Args:
        warm_up: passed to :class:`RankExchange`.
    """
    store = default_store()
    if store is None or torch.distributed.get_world_size() < 2:
        return None
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    return RankExchange(store, rank, world_size, session=next(_sessions), warm_up=warm_up)


def _unpack(value: bytes, window: int) -> Tensor | None:
    """Return the rows that a rank sent for ``window``; None if ``value`` belongs to another window, or is no such
    message."""
    if len(value) % 8 or len(value) < 8 * _HEADER:
        return None
    numbers = torch.frombuffer(bytearray(value), dtype=torch.float64)
    if numbers[:_HEADER].tolist() != [_LAYOUT, window, (len(numbers) - _HEADER) / 3]:
        return None
    return numbers[_HEADER:].view(-1, 3)
