"""watch_loader: a loop of one's own goes through the same batches, and is measured as one of Lightning's."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_feed import any_loop as plain_loop
from lightning_feed import watch_loader
from lightning_feed.any_loop import PlainRun, WatchedLoader

MS = 1_000_000


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Source:
    """Each batch takes 3 ms, by a clock that stands still otherwise; the first of an epoch takes 100."""

    def __init__(self, batches: int = 40) -> None:
        self.batches = batches
        self.ns = 0
        self.device = torch.device("cpu")

    def clock(self) -> int:
        return self.ns

    def pass_ms(self, ms: int) -> None:
        self.ns += ms * MS

    def __iter__(self) -> Iterator[int]:
        for number in range(self.batches):
            self.pass_ms(3 if number else 100)
            yield number


def _watched(source: Source, *, shows: bool = False) -> WatchedLoader[int]:
    run = PlainRun(clock=source.clock)
    run.shows = shows
    return WatchedLoader(source, run)


def _train(loader: WatchedLoader[int], source: Source, *, epochs: int = 1, ms: int = 7) -> None:
    for _ in range(epochs):
        for _ in loader:
            source.pass_ms(ms)


def test_time_in_next_counts_as_waiting_and_the_rest_as_the_step() -> None:
    source = Source()
    loader = _watched(source)
    _train(loader, source, epochs=2)
    stats = loader.summary()
    assert (stats.step_ms, stats.data_ms, stats.compute_ms) == (10.0, 3.0, 7.0)
    assert stats.starved_pct == pytest.approx(30.0)
    assert stats.epoch_start_s == pytest.approx(0.1)
    assert (stats.copy_ms, stats.other_ms) == (None, None)  # nobody saw them
    assert stats.steps == 2 * 40 - 20 - 1  # but the warm-up, and the first of the second epoch


# --- the same loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_and_random_numbers_equal_those_of_the_plain_loop(workers: int) -> None:
    def batches(*, watched: bool) -> list[Any]:
        torch.manual_seed(5)
        loader: Any = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers)
        loader = watch_loader(loader, report=False) if watched else loader
        return [batch.tolist() for _ in range(2) for batch in loader] + [torch.rand(2).tolist()]

    assert batches(watched=True) == batches(watched=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_drawn_between_iter_and_the_first_batch_are_the_same(workers: int) -> None:
    def drawn(*, watched: bool) -> list[Any]:
        torch.manual_seed(5)
        loader: Any = DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers)
        batches = iter(watch_loader(loader, report=False) if watched else loader)
        weights = torch.rand(2).tolist()
        return [weights, next(batches).tolist(), torch.rand(2).tolist()]

    assert drawn(watched=True) == drawn(watched=False)


def test_an_epoch_left_by_break_counts_all_steps_but_its_last() -> None:
    source = Source()
    loader = _watched(source)
    for _ in range(3):
        for number in loader:
            source.pass_ms(7)
            if number == 19:
                break
    assert loader.summary().steps == 3 * 19 - 20 - 1
    assert loader._run.live == []


def test_batches_are_not_kept_alive_by_the_watched_loader() -> None:
    class Batch:
        pass

    class Made:
        def __iter__(self) -> Iterator[Batch]:
            return (Batch() for _ in range(3))

    for batch in watch_loader(Made(), report=False):
        ref = weakref.ref(batch)
        del batch
        assert ref() is None


def test_a_training_step_with_a_validation_inside_is_not_counted() -> None:
    source = Source()
    loader = _watched(source)
    validation = _watched(source)
    for number in loader:
        source.pass_ms(7)
        if number == 30:
            _train(validation, source)
    assert loader.summary().step_ms == pytest.approx(10.0)
    assert loader.summary().steps == 40 - 2  # with the warm-up, since little else is left
    assert validation.summary().step_ms == pytest.approx(10.0)


def test_loops_in_two_threads_are_measured_as_separate_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts_of = plain_loop._facts_of
    both_begin = threading.Barrier(2, timeout=10)

    def meet(*args: Any) -> Any:
        both_begin.wait()
        return facts_of(*args)

    monkeypatch.setattr(plain_loop, "_facts_of", meet)
    sources = Source(), Source()
    loaders = [_watched(source) for source in sources]
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(_train, *one, epochs=3) for one in zip(loaders, sources, strict=True)]:
            done.result()
    assert [loader.summary().steps for loader in loaders] == [3 * 40 - 20 - 2] * 2
    assert caplog.text == ""


def test_an_error_in_measuring_stops_the_measuring_but_not_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no such clock")

    monkeypatch.setattr(plain_loop, "open_ring", fails)
    loader = watch_loader(DataLoader(Numbers(), batch_size=4))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    loader.close()
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 1
    assert messages[0].startswith("watch_loader stopped measuring (RuntimeError: no such clock). Training goes on")


# --- one run for one loader ---------------------------------------------------------------------------------------


def test_watching_the_same_loader_again_continues_its_run_with_new_options(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(), batch_size=1)
    for _ in range(3):
        for _ in watch_loader(loader, report=False):
            pass
    again = watch_loader(loader, folder=tmp_path, device="cpu", report=False)
    assert again._run.folder == tmp_path
    assert again.summary().steps == 36 - 3
    again.close()
    assert watch_loader(loader, report=False).summary().steps == 0
    assert json.loads((tmp_path / "feed_report.json").read_text())["run"]["loop"] == "plain"


# --- reports ------------------------------------------------------------------------------------------------------


def test_each_run_writes_one_report_file_that_later_runs_leave_alone(tmp_path: Path) -> None:
    for _ in range(2):
        loader = watch_loader(DataLoader(Numbers(), batch_size=1), folder=tmp_path, device="cpu")
        for _ in range(20):  # a report after 200 steps
            for _ in loader:
                pass
        loader.close()
    names = sorted(path.name for path in tmp_path.glob("feed_report*.json"))
    assert names == ["feed_report-2.json", "feed_report.json"]


def test_the_first_report_comes_after_200_steps_and_another_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(250)
    with _watched(source, shows=True) as loader:
        for number in loader:
            source.pass_ms(7)
            assert capsys.readouterr().out.count("FEED") == (number == 200)  # step 199 ends when 200 is asked for
    assert "of each step" in capsys.readouterr().out
    loader.close()
    assert capsys.readouterr().out == ""


def test_ranks_other_than_0_print_no_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = Source()
    with _watched(source, shows=True) as loader:
        _train(loader, source)
    assert capsys.readouterr().out == ""
    assert loader.report().measurements.facts.world_size == 2


SCRIPT = """
import sys
from torch.utils.data import DataLoader
from lightning_feed import watch_loader
loader = DataLoader(range(12))
for _ in range(3):
    for batch in watch_loader(loader):
        pass
print("modules", sorted({"lightning", "pytorch_lightning"} & set(sys.modules)))
"""


def test_a_script_reports_when_it_ends_and_imports_no_lightning() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    first, *report = done.stdout.splitlines()
    assert first == "modules []"
    assert report[0].startswith("FEED")
