"""Programs as ``python`` starts them, but in processes that have imported torch and Lightning already.

Importing both takes 5 to 15 s, which a test that is not about it need not pay. One process for the whole session, with
all workers of pytest, imports what is named in ``FEED_WARM_PRELOAD``. It is forked for each program, which is then run
as Python runs it: with its own ``__main__``, arguments, path, environment and streams, and Python's own end.

The process is started by the first program, and ends with the session.
"""

import contextlib
import fcntl
import gc
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = "FEED_WARM_FOLDER"
"""Environment variable: the folder of the session, which all workers of pytest share."""
PRELOAD = "FEED_WARM_PRELOAD"
"""Environment variable: names of modules, separated by spaces."""
OWNER = "FEED_WARM_OWNER"
"""Environment variable: the process with whose end the session ends."""
START_S = 120
"""Most seconds for the imports, on a machine that does much else."""


def open_session(preload: Sequence[str]) -> None:
    """Called once, before workers of pytest are started."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="feed_warm_")
        os.environ[PRELOAD] = " ".join(preload)
        os.environ[OWNER] = str(os.getpid())


class Program:
    """A running program. ``pid`` is its process, which leads a session of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile()
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None
        self._connection = connection

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as of ``subprocess.Popen``. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None


def start(
    arguments: Sequence[object],
    *,
    streams: tuple[int, int, int],
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    cpus: set[int] | None = None,
) -> Program:
    """Start a program with these arguments of Python: ``-c CODE``, ``-m MODULE`` or a file, and what it is given.

    Args:
        arguments: as of the command line, without ``python``.
        streams: file descriptors for stdin, stdout and stderr.
        cwd: its working folder; by default that of this process.
        env: its environment; by default that of this process.
        cpus: the CPUs that it may use; by default those of this process.
    """
    job = {
        "arguments": [str(argument) for argument in arguments],
        "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
        "cpus": sorted(cpus or os.sched_getaffinity(0)),
    }
    connection = _connect()
    text = json.dumps(job).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], list(streams))
    connection.sendall(text)
    return Program(connection)


def run(arguments: Sequence[object], *, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run`` does with ``capture_output`` and ``text``."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:  # noqa: PTH123
        program = start(arguments, streams=(nothing.fileno(), out.fileno(), err.fileno()), **options)
        try:
            status = program.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(arguments), status, out.read(), err.read())


def start_into(file: Path, arguments: Sequence[object], **options: Any) -> Program:
    """Start a program that prints into a file, errors too."""
    with file.open("w") as printed, open(os.devnull) as nothing:  # noqa: PTH123
        return start(arguments, streams=(nothing.fileno(), printed.fileno(), printed.fileno()), **options)


def _connect() -> socket.socket:
    folder = Path(os.environ[FOLDER])
    address = folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "log").exists():
            _start_server(folder)
    latest = time.monotonic() + START_S
    while not address.exists():
        assert time.monotonic() < latest, (folder / "log").read_text()
        time.sleep(0.05)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    return connection


def _start_server(folder: Path) -> None:
    with (folder / "log").open("w") as log:
        subprocess.run(  # it leaves the process behind
            [sys.executable, __file__, folder, os.environ[OWNER], *os.environ[PRELOAD].split()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )


# --- the warm process -------------------------------------------------------------------------------------------------


def serve(folder: Path, owner: int, preload: Sequence[str]) -> tuple[dict[str, Any], list[int]]:
    """Wait for programs until the session ends. Returns in the process of each program: the job, and its streams."""
    for name in preload:
        import_module(name)
    gc.collect()
    gc.freeze()  # what the programs collect is not copied for them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "new"))
    listener.listen(64)
    (folder / "new").rename(folder / "socket")
    while True:
        asked = select.select([listener], [], [], 1.0)[0]
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        if not asked:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork the program, and tell who asked for it its process and its end. Returns in the process of the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as sent:
        job = json.loads(sent.read(int.from_bytes(size, "big")))
    ready, leads = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(ready)
        os.close(leads)
        connection.close()
        return job, streams
    for descriptor in (leads, *streams):
        os.close(descriptor)
    os.read(ready, 1)  # its end: from now on the program leads a session
    connection.sendall(f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # nobody asks any more
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def become(job: dict[str, Any], streams: Sequence[int]) -> None:
    """Make this process what Python makes of one that it has just started."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    os.sched_setaffinity(0, job["cpus"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def execute(arguments: Sequence[str]) -> None:
    """Run the program."""
    kind, *rest = arguments
    first = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(kind).resolve().parent))
    python_path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *python_path, *BASE]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    BASE = [entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    if os.fork():
        os._exit(0)
    work, given = serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    become(work, given)
    execute(work["arguments"])
