"""Other workers for a living loader: the old ones end, and nothing is drawn that would not have been drawn."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.tuning.resettle import resettle, why_fixed, why_no_workers

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def made(kind: Any, **options: Any) -> DataLoader[Any]:
    loader: DataLoader[Any] = kind(list(range(12)), **{"batch_size": 2, "num_workers": 1, **options})
    return loader


@pytest.mark.parametrize("kind", [DataLoader, FeedLoader])
def test_kept_workers_end_before_others_start(kind: Any) -> None:
    loader = made(kind, persistent_workers=True)
    list(loader)
    old: Any = loader._iterator
    (worker,) = old._workers
    assert worker.is_alive()
    put_back = resettle(loader, 2, 3)
    assert not worker.is_alive()
    batches = torch.cat(list(loader))
    put_back()
    now: Any = loader._iterator
    assert (len(now._workers), now._prefetch_factor) == (2, 3)
    assert batches.tolist() == list(range(12))
    now._shutdown_workers()


def test_kept_threads_end_before_others_start() -> None:
    loader = made(FeedLoader, workers="thread", persistent_workers=True)
    list(loader)
    old: Any = loader._iterator
    resettle(loader, 3, 2)
    assert not any(thread.is_alive() for thread in old.threads)
    assert torch.cat(list(loader)).tolist() == list(range(12))
    now: Any = loader._iterator
    assert len(now.threads) == 3
    now.close()


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_nothing_is_drawn_that_kept_workers_would_not_have_drawn(generator: torch.Generator | None) -> None:
    drawn = []
    for change in (False, True):
        torch.manual_seed(0)
        if generator is not None:
            generator.manual_seed(0)
        loader = made(DataLoader, persistent_workers=True, shuffle=True, generator=generator)
        list(loader)
        put_back = resettle(loader, 2, 2) if change else None
        second = torch.cat(list(loader)).tolist()
        if put_back is not None:
            put_back()
        third = torch.cat(list(loader)).tolist()
        assert loader.generator is generator
        drawn.append((second, third, torch.rand(2, generator=generator).tolist()))
        kept: Any = loader._iterator
        kept._shutdown_workers()
    assert drawn[0] == drawn[1]


def test_workers_that_start_each_epoch_draw_as_before() -> None:
    loader = made(DataLoader)
    own = loader.generator = torch.Generator()
    resettle(loader, 2, 2)
    assert loader.generator is own


def test_a_thread_that_reads_ahead_is_ended_first() -> None:
    loader = made(FeedLoader, background=2, persistent_workers=True)
    batches: Any = iter(loader)
    next(batches)
    resettle(loader, 2, 2)
    assert batches.background is None
    assert torch.cat(list(loader)).tolist() == list(range(12))
    now: Any = loader._iterator
    now._shutdown_workers()


class OnlyHere:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("a file that belongs to the training process")
        return index


def test_a_worker_is_tried_before_there_are_any() -> None:
    assert why_no_workers(made(DataLoader, num_workers=0, shuffle=True)) == ""
    before = torch.get_rng_state()
    why = why_no_workers(DataLoader(OnlyHere(), 2))  # type: ignore[arg-type]
    assert "a file that belongs to the training process" in why
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_cannot_be_added_where_there_are_none() -> None:
    assert "made for threads" in why_fixed(made(FeedLoader, num_workers=0, workers="thread"))
    assert why_fixed(made(FeedLoader, workers="thread")) == ""
    assert "is no DataLoader" in why_fixed([1, 2])
