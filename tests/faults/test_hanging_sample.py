"""A sample that hangs: one warning that says where, and Ctrl-C that does not wait for it."""

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from lightning_feed.load.build import Part, build_loader
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.recommend import RunFacts
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.load.watchdog import LateBatch, Watch
from lightning_feed.load.worker import WorkerInit, stack_of


class Clock:
    """Seconds that go by when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Hangs(Dataset[int]):
    """Hangs at sample 6 until it is let go, whatever is raised in it."""

    def __init__(self, context: Any = multiprocessing) -> None:
        self.reached, self.go_on = context.Event(), context.Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 6:
            while not self.go_on.is_set():
                try:
                    self.waits_for_a_server()
                except KeyboardInterrupt:
                    continue
        return index

    def waits_for_a_server(self) -> None:
        self.reached.set()  # in here, where the stack is to show it
        self.go_on.wait(60)


class HangingStream(IterableDataset[int]):
    def __init__(self) -> None:
        self.inner = Hangs()

    def __iter__(self) -> Iterator[int]:
        return (self.inner[index] for index in range(12))


class Loop:
    """A training loop in a thread of its own, which hangs at sample 6."""

    def __init__(self, loader: FeedLoader, data: Hangs) -> None:
        self.batches, self.data, self.came = iter(loader), data, list[list[int]]()
        self.clock = Clock()
        self.late = self.batches._late = LateBatch(self.batches, Watch("train", 60.0), self.clock)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for batch in self.batches:
            self.came.append(batch.tolist())

    def __enter__(self) -> "Loop":
        self.thread.start()
        assert self.data.reached.wait(60)
        while self.late._since is None or len(self.came) < 3:  # the last batch before it is trained
            time.sleep(0.01)
        return self

    def __exit__(self, *exception: object) -> None:
        self.data.go_on.set()
        self.thread.join(60)
        assert sorted(sample for batch in self.came for sample in batch) == list(range(12))


MODES: dict[str, dict[str, Any]] = {
    "main process": {},
    "background": {"background": 1},
    "processes": {"num_workers": 2, "prefetch_factor": 1},
    "spawned": {"num_workers": 1, "multiprocessing_context": "spawn"},
    "persistent": {"num_workers": 2, "persistent_workers": True, "background": 1},
    "threads": {"num_workers": 2, "workers": "thread"},
}


SPAWNS = pytest.mark.slow


def loader_of(mode: str) -> tuple[FeedLoader, Hangs]:
    options = MODES[mode]
    data = Hangs(multiprocessing.get_context(options.get("multiprocessing_context")))
    init = WorkerInit() if "num_workers" in options and "workers" not in options else None
    return FeedLoader(data, batch_size=2, worker_init_fn=init, **options), data


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=SPAWNS if mode == "spawned" else ()) for mode in MODES])
def test_a_hanging_sample_is_reported_with_its_indices_and_stack(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    loader, data = loader_of(mode)
    with Loop(loader, data) as loop:
        loop.late.check()
        assert not caplog.records
        loop.clock.now += 61
        loop.late.check()
        loop.late.check()
        (record,) = [one for one in caplog.records if one.name.endswith("load.watchdog")]
        said = record.getMessage()
        assert record.levelno == logging.WARNING
        assert "No batch of train has arrived for 61 s" in said
        assert "[6, 7]" in said or "index 6" in said
        assert "waits_for_a_server" in said
        if mode in ("processes", "spawned", "persistent"):
            assert f"process {multiprocessing.active_children()[-1].pid}" in said or "Worker 1 (process" in said
        elif mode == "threads":
            assert "Thread worker" in said
        loop.clock.now += 500
        loop.late.check()
        assert len(caplog.records) == 1
        loop.clock.now += 200
        loop.late.check()
        assert len(caplog.records) == 2


class Stops(Dataset[int]):
    """Stops its process at sample 7, which is in the fourth batch."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 7:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def test_a_stopped_worker_is_reported_with_all_batches_it_has_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    loader = FeedLoader(Stops(), batch_size=2, num_workers=1, prefetch_factor=6, worker_init_fn=WorkerInit())
    batches, clock = iter(loader), Clock()
    late = LateBatch(batches, Watch("train", 60.0), clock)
    (worker,) = batches.source._workers
    try:
        while "stopped" not in Path(f"/proc/{worker.pid}/status").read_text():
            time.sleep(0.01)
        late._since = 0.0  # as when the loop begins to wait, for the first batch here
        clock.now += 61
        late.check()
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert f"Worker 0 (process {worker.pid}) has not sent the samples [0, 1], nor 5 batches after that." in caplog.text
    assert "It may be at any of these." in caplog.text
    assert "T (stopped)" in caplog.text
    assert [batch.tolist() for batch in batches] == [[number, number + 1] for number in range(0, 12, 2)]


def test_a_hanging_stream_is_reported_by_task_instead_of_samples(caplog: pytest.LogCaptureFixture) -> None:
    stream = HangingStream()
    with Loop(FeedLoader(stream, batch_size=2, num_workers=1, worker_init_fn=WorkerInit()), stream.inner) as loop:
        loop.clock.now += 61
        loop.late.check()
    assert "Worker 0" in caplog.text
    assert "task 3 of this pass" in caplog.text
    assert "waits_for_a_server" in caplog.text


def test_the_watchdog_thread_reports_by_itself_and_ends_with_the_pass(caplog: pytest.LogCaptureFixture) -> None:
    data = Hangs()
    batches = iter(FeedLoader(data, batch_size=2, watch=Watch("train", 0.05)))
    loop = threading.Thread(target=lambda: list(batches))
    loop.start()
    while "No batch of train" not in caplog.text:
        time.sleep(0.01)
    data.go_on.set()
    loop.join()
    watching = batches._late._thread
    watching.join(10)
    assert not watching.is_alive()


def test_user_signal_handlers_and_unresponsive_processes_are_left_alone() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    WorkerInit()(0)  # not in a worker
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    asleep = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    asleep.start()
    try:
        assert "not available; the kernel says of the process: " in stack_of(asleep.pid)
        assert asleep.is_alive()
    finally:
        asleep.kill()
        asleep.join()
    assert "not available" in stack_of(asleep.pid)


def test_each_loader_of_a_data_module_is_watched() -> None:
    part = Part(
        name="train", split="train", batch_size=2, together=1, sampler=lambda _: None, collate_fn=None,
        order=EpochOrder(seed=0, epoch=lambda: 0),
    )  # fmt: skip
    assert build_loader(range(4), part, LoaderSettings(num_workers=0), RunFacts())[0].watch == Watch("train", 60)


@pytest.mark.parametrize("mode", ["processes", pytest.param("spawned", marks=SPAWNS), "threads", "background"])
def test_ctrl_c_does_not_wait_for_a_hanging_sample(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import _utils

    gc.collect()  # what other tests left behind would wait below, too
    loader, data = loader_of(mode)
    batches = iter(loader)
    workers = list(getattr(batches.source, "_workers", ()))
    # Whoever waits for the sample would do so for longer than the test may take.
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 1000)
    monkeypatch.setattr("lightning_feed.load.threads.ThreadPass.close.__defaults__", (1000,))

    def press() -> None:
        data.reached.wait(60)
        time.sleep(0.2)  # until the loop waits
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(batches)
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive()
    finally:
        if not workers:  # an Event would wait for those that were waiting for it
            data.go_on.set()
