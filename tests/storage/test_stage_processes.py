"""Several processes stage at once, are killed in the middle, and clean up behind them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import stage
from lightning_feed.storage.staging import StagePlace, claimed, release

# A process that says so when its first file is in place, then stands still until it is told to go on, or is killed.
PAUSED = """
import sys
from lightning_feed.storage import stage, stage_copy
real, told = stage_copy.Mirror._copy_file, []
def copy_file(self, name, advance):
    if told:
        sys.stdin.readline()
    real(self, name, advance)
    if not told:
        told.append(name)
        print("copied one", flush=True)
stage_copy.Mirror._copy_file, stage_copy.LocalOrigin.threads = copy_file, 1
done = stage(sys.argv[1], sys.argv[2])
print(done.copied_files, flush=True)
sys.stdin.readline()
"""
STAGE = """
import sys
from lightning_feed.storage import stage
done = stage(sys.argv[1], sys.argv[2], remove_at_exit="remove" in sys.argv)
print(done.copied_files, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "birds"
    root.mkdir(parents=True)
    for number in range(6):
        (root / f"{number}.jpg").write_bytes(bytes([number]) * 10_000)
    return root


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "fast"


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: "subprocess.Popen[str]") -> None:
    for process in processes:
        process.communicate("\n" * 10)
        assert process.returncode == 0


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_one_copies_and_the_others_wait_for_the_same_copy(source: Path, dest: Path) -> None:
    first = start(PAUSED, source, dest)
    assert line(first) == "copied one"
    others = [start(STAGE, source, dest) for _ in range(2)]
    with pytest.raises(ArchiveError, match=rf"being copied by process {first.pid} on .*after 0 s"):
        stage(source, dest, wait_s=0)
    assert first.stdin is not None
    first.stdin.write("\n" * 6)
    first.stdin.flush()
    assert line(first) == "6"
    assert [line(other) for other in others] == ["0", "0"]
    assert contents(dest / "birds") == contents(source)
    end(first, *others)


def test_a_copy_whose_process_was_killed_is_gone_on_with(
    source: Path, dest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(PAUSED, source, dest)
    assert line(first) == "copied one"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    with caplog.at_level("INFO"):
        assert stage(source, dest).copied_files == 5
    assert f"process {first.pid}" in caplog.text
    assert contents(dest / "birds") == contents(source)


def test_the_last_user_removes_the_copy(source: Path, dest: Path) -> None:
    first, second = start(STAGE, source, dest, "remove"), None
    assert line(first) == "6"
    second = start(STAGE, source, dest, "remove")
    assert line(second) == "0"
    end(first)
    assert contents(dest / "birds") == contents(source)
    end(second)
    assert list(dest.iterdir()) == []


def test_a_copy_that_was_there_before_stays(source: Path, dest: Path) -> None:
    stage(source, dest)
    release(StagePlace(dest / "birds"))
    again = start(STAGE, source, dest, "remove")
    assert line(again) == "0"
    end(again)
    assert contents(dest / "birds") == contents(source)


FORKED = """
import os, sys, time
from pathlib import Path
from lightning_feed.storage.staging import StagePlace, claimed
claim = claimed(StagePlace(Path(sys.argv[1])))
claim.__enter__()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
"""


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_process(dest: Path) -> None:
    dest.mkdir()
    place = StagePlace(dest / "birds")
    first = start(FORKED, place.target)
    child = int(line(first))
    try:
        with pytest.raises(ArchiveError, match="being copied by another process"), claimed(place, wait_s=0):
            pass
        first.kill()
        first.wait()
        os.kill(child, 0)  # it lives
        with claimed(place, wait_s=10):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        first.communicate()
