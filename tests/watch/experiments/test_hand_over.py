"""X7: taking a batch that is ready, with two sharing strategies, in a process of its own."""

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from watch.experiments.made_data import Images, Stream

from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.watch.experiments import hand_over
from lightning_feed.watch.experiments.hand_over import HandOver, measure_hand_over, taking_times
from lightning_feed.watch.experiments.subject import Part, record_sample
from lightning_feed.watch.loader_state import QueueState


def _measure(loader: Any) -> HandOver | str:
    part = Part("", loader)
    return measure_hand_over((part,), [record_sample(part)], passes=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Images, Stream])
def test_both_strategies_are_tried_and_nothing_of_it_stays(data: type, workers: int) -> None:
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    loader = DataLoader(data(), batch_size=4, num_workers=workers)
    found = _measure(loader)
    assert isinstance(found, HandOver)
    assert found.strategy == before == torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    assert found.ms > 0
    assert found.file_system_ms is not None
    assert found.file_system_ms > 0
    assert loader._iterator is None
    assert multiprocessing.active_children() == []


def test_our_loaders_hand_over_without_their_background_thread() -> None:
    assert isinstance(_measure(FeedLoader(Images(), batch_size=4, num_workers=1, background=2)), HandOver)
    threads = FeedLoader(Images(), batch_size=4, num_workers=1, workers="thread")
    assert _measure(threads) == "worker threads hand nothing over"


def test_spawned_workers_are_left_out() -> None:
    loader = DataLoader(Images(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert "spawn" in str(_measure(loader))


def _fails(samples: list[Any]) -> Any:
    raise ValueError("no two alike")


def _ends(samples: list[Any]) -> Any:
    os._exit(3)


def test_what_fails_in_there_is_told_here() -> None:
    assert "no two alike" in str(_measure(DataLoader(Images(), batch_size=4, collate_fn=_fails)))


def test_a_process_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "_compare", lambda *args: os._exit(3))
    assert _measure(DataLoader(Images(), batch_size=4)) == "the process that measured it ended before it was done"


class Script:
    """An iterator whose queue is full every third time that one looks, and whose batches take three ticks."""

    def __init__(self, clock: list[int], *, fills: bool = True) -> None:
        self.clock, self.fills, self.looks = clock, fills, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.clock[0] += 3
            yield default_collate([1])

    def read(self) -> QueueState:
        self.looks += 1
        return QueueState(2 if self.fills and self.looks % 3 == 0 else 1, None, 0)

    def capacity(self) -> int:
        return 2


def test_only_batches_that_were_ready_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    def slept(seconds: float) -> None:
        now[0] += 100

    script = Script(now)
    monkeypatch.setattr(hand_over, "probe_loader", lambda batches: script)
    assert taking_times(script, clock=lambda: now[0], sleep=slept) == [3] * 20
    never = Script(now, fills=False)
    monkeypatch.setattr(hand_over, "probe_loader", lambda batches: never)
    assert taking_times(never, clock=lambda: now[0], sleep=slept) == []
