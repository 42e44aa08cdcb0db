"""Programs that are forked from the warm process are what Python would have started."""

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
import warm

SHOWS = """
import atexit, json, os, sys
if __name__ == "__main__":
    lightning_feed = [name for name in sys.modules if name.startswith("lightning_feed")]
    print(json.dumps([sys.argv, os.getcwd(), os.environ["GIVEN"], sys.path[0], lightning_feed]))
    print("an error", file=sys.stderr)
    atexit.register(print, "the end")
    sys.exit(3)
"""


def test_a_warm_program_has_its_own_arguments_environment_streams_and_end(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    env = os.environ | {"GIVEN": "yes"}
    for arguments, argv, first in (
        (["-c", SHOWS, "a"], ["-c", "a"], ""),
        (["-m", "shows", "a"], [str(tmp_path / "shows.py"), "a"], str(tmp_path)),
        ([tmp_path / "shows.py", "a"], [str(tmp_path / "shows.py"), "a"], str(tmp_path)),
    ):
        done = warm.run(arguments, cwd=tmp_path, env=env)
        shown, end = done.stdout.splitlines()
        assert json.loads(shown) == [argv, str(tmp_path), "yes", first, []]
        assert (done.stderr, end, done.returncode) == ("an error\n", "the end", 3)


def test_a_warm_program_is_killed_with_its_session() -> None:
    with tempfile.TemporaryFile() as file:
        program = warm.start(["-c", "import time; time.sleep(600)"], streams=(file.fileno(),) * 3)
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    os.killpg(program.pid, signal.SIGKILL)
    assert program.wait(60) == -signal.SIGKILL
