"""Several processes stage at once, and are killed in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import stage
from lightning_feed.storage.whole import Workshop

# A process that says so when its first file is copied, then stands still until it is told to go on, or is killed.
PAUSED = """
import sys
from lightning_feed.storage import staging
real, told = staging._LocalSource._copy_file, []
def copy_file(self, path, copy, bar):
    if told:
        sys.stdin.readline()
    real(self, path, copy, bar)
    if not told:
        told.append(path)
        print("copied one", flush=True)
staging._LocalSource._copy_file, staging._THREADS = copy_file, 1
print(staging.stage(sys.argv[1], sys.argv[2]).copied, flush=True)
"""
STAGE = """
import sys
from lightning_feed.storage import stage
print(stage(sys.argv[1], sys.argv[2]).copied, flush=True)
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


def test_one_process_copies_and_the_others_wait_for_its_copy(source: Path, dest: Path) -> None:
    first = start(PAUSED, source, dest)
    assert line(first) == "copied one"
    others = [start(STAGE, source, dest) for _ in range(2)]
    assert not (dest / "birds").exists()
    assert first.stdin is not None
    first.stdin.write("\n" * 6)
    first.stdin.flush()
    assert line(first) == "True"
    assert [line(other) for other in others] == ["False", "False"]
    assert contents(dest / "birds") == contents(source)
    end(first, *others)


def test_a_copy_whose_process_was_killed_is_made_again(source: Path, dest: Path) -> None:
    first = start(PAUSED, source, dest)
    assert line(first) == "copied one"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (dest / "birds").exists()
    assert stage(source, dest).copied
    assert contents(dest / "birds") == contents(source)
    assert sorted(path.name for path in (dest / ".birds.staging").iterdir()) == ["lock", "record.json"]


FORKED = """
import os, sys, time
from pathlib import Path
from lightning_feed.storage.whole import Workshop
claim = Workshop(Path(sys.argv[1]), "staging").claimed(wait=False)
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
    workshop = Workshop(dest / "birds", "staging")
    first = start(FORKED, workshop.target)
    child = int(line(first))
    try:
        with pytest.raises(ArchiveError, match="Another process is writing"), workshop.claimed(wait=False):
            pass
        first.kill()
        first.wait()
        os.kill(child, 0)  # it lives
        with workshop.claimed(wait=True):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        first.communicate()
