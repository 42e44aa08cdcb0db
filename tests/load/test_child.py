"""Forked children answer, fail, hang and die; the parent always goes on, and none of them is left."""

import gc
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.child import run_in_children
from lightning_feed.machine.killed import killed_ticks


def test_children_run_in_separate_processes_and_all_answer() -> None:
    pids = run_in_children([os.getpid] * 3, timeout_s=20)
    assert len({os.getpid(), *pids}) == 4


def test_work_in_a_child_changes_nothing_in_the_parent() -> None:
    numbers = [1]
    state = torch.get_rng_state()

    def work() -> int:
        numbers.append(2)
        torch.manual_seed(3)
        return len(numbers)

    assert run_in_children([work], timeout_s=20) == [2]
    assert numbers == [1]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_child_computes_with_the_threads_it_is_given(threads: int) -> None:
    """Threads of OpenMP that the parent has do not survive the fork, and a child that uses them would hang."""
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    matrix = torch.rand(600, 600)
    try:
        expected = (matrix @ matrix).sum()  # the parent has its threads from here on

        def work() -> tuple[int, float]:
            return torch.get_num_threads(), float((matrix @ matrix).sum())

        ((used, total),) = run_in_children([work], timeout_s=60, torch_threads=threads)
    finally:
        torch.set_num_threads(usual)
    assert used == threads
    assert total == pytest.approx(float(expected))


def test_the_cpu_time_of_processes_that_children_leave_behind_is_known() -> None:
    """The kernel gives it to nobody, and it would count as that of other programs."""

    def work() -> int:
        done, write = os.pipe()
        if not os.fork():
            burn(0.3)
            os.write(write, b"x")
            signal.pause()
        os.read(done, 1)
        return burn(0.3)

    def burn(seconds: float) -> int:
        while time.process_time() < seconds:
            sum(range(1000))
        return 1

    def known_s() -> float:
        times = os.times()
        return times.children_user + times.children_system + killed_ticks() / os.sysconf("SC_CLK_TCK")

    before_s = known_s()
    run_in_children([work], timeout_s=60)
    assert known_s() - before_s > 0.55  # ticks of 10 ms


def test_reading_in_a_child_moves_no_file_of_the_parent(tmp_path: Path) -> None:
    (tmp_path / "raster").write_bytes(b"0123456789")
    file = os.open(tmp_path / "raster", os.O_RDONLY)  # as a C library holds it: no Python object knows its path
    try:
        os.read(file, 3)
        assert run_in_children([lambda: os.read(file, 4)] * 2, timeout_s=60) == [b"3456", b"3456"]
        assert os.read(file, 4) == b"3456"
    finally:
        os.close(file)


def test_package_errors_raised_in_a_child_keep_their_class() -> None:
    def work() -> None:
        raise DatasetError("sample 3 is cut short")

    with pytest.raises(DatasetError, match="sample 3 is cut short"):
        run_in_children([work] * 2, timeout_s=20)


def test_other_errors_raised_in_a_child_become_loader_errors() -> None:
    with pytest.raises(LoaderError, match="ZeroDivisionError: division by zero"):
        run_in_children([lambda: 1 / 0], timeout_s=20)


def test_hanging_child_is_killed_with_its_own_children() -> None:
    reading, writing = os.pipe()

    def work() -> None:
        grandchild = os.fork()
        if not grandchild:
            time.sleep(60)
            os._exit(0)
        os.write(writing, f"{grandchild}\n".encode())
        time.sleep(60)

    with pytest.raises(LoaderError, match="it gave nothing within 1 s"):
        run_in_children([work], timeout_s=1)
    grandchild = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    assert _ended(grandchild)


def test_killed_child_is_reported_with_its_exit_code() -> None:
    with pytest.raises(LoaderError, match=r"its process ended early \(exit code -9\)"):
        run_in_children([lambda: os.kill(os.getpid(), signal.SIGKILL)], timeout_s=20)


class Deadly:
    """Garbage that ends a child in which it is collected, as CUDA events do; it is in a cycle."""

    def __init__(self) -> None:
        self.me = self
        self.parent = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.parent:
            os._exit(3)


def test_garbage_of_the_parent_is_not_collected_in_a_child() -> None:
    gc.collect()
    gc.disable()
    try:
        Deadly()
        assert run_in_children([gc.collect], timeout_s=20)
    finally:
        gc.enable()
        gc.collect()


def _ended(pid: int) -> bool:
    """True once a process has ended; as a zombie, too, since its parent is gone."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_during_a_fork_reaches_the_parent() -> None:
    """Python ignores the errors of functions that it calls after a fork; logging and random register such ones."""
    after_fork: list[signal.Signals] = [signal.SIGINT]
    os.register_at_fork(after_in_parent=lambda: signal.raise_signal(after_fork.pop()) if after_fork else None)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_children([lambda: time.sleep(60)] * 2, timeout_s=60)
    assert multiprocessing.active_children() == []
    assert time.monotonic() - began_s < 30  # none of the children was waited for
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_run_in_children_works_outside_the_main_thread() -> None:
    """Only the main thread may set a signal handler."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_in_children, [lambda: 3], timeout_s=20).result() == [3]
