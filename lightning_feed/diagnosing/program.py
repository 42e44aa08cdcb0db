"""The fit to diagnose or tune: the first ``Trainer.fit`` of the user's program."""

import gc
import importlib
import inspect
import io
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.autoload import PROGRAM
from lightning_feed.diagnosing.failures import ProgramEnded
from lightning_feed.diagnosing.restoring import quiet
from lightning_feed.errors import SettingsError
from lightning_feed.load.kinds import AnyLoader
from lightning_feed.measure.loader_code import is_users
from lightning_feed.wording import plural

CLEAN_UP_S = 5.0
"""Longest time for ending child processes."""


@dataclass(frozen=True)
class Program:
    """The user's program."""

    name: str
    """``train.py``; with ``is_module``, ``package.module``."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The objects to train: the arguments of a program's first ``Trainer.fit``."""

    trainer: Any
    model: Any
    datamodule: Any = None
    train_dataloaders: AnyLoader = None
    ended: str = ""
    """Sentences that name the line at which the program was ended, and the training that it would do next."""


def run_until_fit(program: Program, take: Callable[[Fit], int]) -> NoReturn:
    """Run a program, call ``take`` instead of its first ``Trainer.fit``, and end the process there.

    The program runs in this process as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``, and with the
    ``fit`` of ``lightning.pytorch`` and ``pytorch_lightning`` replaced. When ``take`` returns, the process ends without
    unwinding the program's stack: its ``finally``, ``except`` and ``with`` blocks do not run, and neither do its
    handlers for signals and for the end of the process. The program's open files are flushed before ``take``.

    Args:
        program: the program to run.
        take: called inside the program's call of ``fit``. stdin, stdout and stderr are then as before the program
            ran. Returns the exit code of the process. Errors in ``take`` are printed with their traceback.

    Raises:
        SettingsError: there is no such program, or this process is one of several ranks.
        ProgramEnded: the program ended before it called ``fit``. If it failed, its traceback has been printed.
    """
    _refuse_ranks(program)
    path = _path_of(program)
    try:
        with _as_main(program, path) as streams, _Takeover(program, take, streams).in_place():
            if program.is_module:
                runpy.run_module(program.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        code = _exit_code(end)
        raise ProgramEnded(f"{program} ended by an exit with {code} before it called Trainer.fit.", code or 1) from end
    except Exception as error:
        programs_part = _part_of_program(error.__traceback__)
        if program.is_module and isinstance(error, ImportError) and programs_part is None:  # no line of it ran
            raise SettingsError(f"{program} cannot be run: {error}. Give SCRIPT.py, or -m package.module.") from error
        sys.excepthook(type(error), error.with_traceback(programs_part), error.__traceback__)
        raise ProgramEnded(f"{program} failed before it called Trainer.fit.", 1) from error
    arguments = " ".join(program.arguments) or "none"
    raise ProgramEnded(
        f"{program} ended without calling Trainer.fit in this process, so there is nothing to measure. "
        f"Its arguments were: {arguments}. If it needs arguments to train, put them after `--`: "
        f"{program} -- ARGS. If it trains in another process, name the program that runs there.",
        1,
    )


class _Takeover:
    """The replacement of ``fit``, which does not return."""

    def __init__(self, program: Program, take: Callable[[Fit], int], streams: tuple[TextIO, TextIO]) -> None:
        self._program = program
        self._take = take
        self._streams = streams
        self._pid = os.getpid()
        self._taking = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace ``fit`` of every Trainer, as a context manager."""
        with ExitStack() as undo:
            for name in _host.PACKAGES.values():
                with quiet(), suppress(Exception):  # a package that cannot be imported cannot train
                    trainer = importlib.import_module(name).Trainer
                    undo.callback(_host.replace_in_class(trainer, "fit", self._around))
            yield

    def _around(self, original: Callable[..., Any], trainer: AnyTrainer, *args: object, **kwargs: object) -> Any:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._taking and in_main_thread:
            return original(trainer, *args, **kwargs)
        arguments = _host.arguments_of(original, trainer, args, kwargs)  # raises in the program if they are wrong
        if os.getpid() != self._pid:
            self._refuse("a process that it had forked")
        if not in_main_thread:  # the main thread would go on, and only it receives Ctrl-C
            _flush_files()
            self._refuse("another thread than its main one")
        code = 1
        try:
            self._taking = True
            _flush_files()
            sys.stdout, sys.stderr = self._streams
            _drop_signal_handlers()
            code = self._take(_fit_of(self._program, trainer, arguments))
        except SystemExit as end:
            code = _exit_code(end)
        except BaseException:  # noqa: BLE001  # must not reach the program
            traceback.print_exc()
        finally:
            try:
                end_children()
            finally:
                os._exit(code)

    def _refuse(self, where: str) -> NoReturn:
        problem = f"{self._program} called Trainer.fit in {where}, where it cannot be replaced. Nothing was trained."
        try:
            print(f"lightning-feed: {problem}", file=self._streams[1], flush=True)
        finally:
            os._exit(1)


def _flush_files() -> None:
    """Flush the files that the program has open, as Python would when it ends."""
    for file in gc.get_objects():
        if type(file) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):  # closed, detached, or a pipe without a reader
                file.flush()


def _drop_signal_handlers() -> None:
    """Remove the program's signal handlers. Ctrl-C and SIGTERM then end the command; its other signals are ignored."""
    defaults: dict[int, Any] = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGCHLD: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        is_of_torch = str(getattr(handler, "__module__", "")).startswith("torch.")  # notices workers that end
        if callable(handler) and not is_of_torch:
            signal.signal(number, defaults.get(number, signal.SIG_IGN))


def end_children() -> None:
    """End daemonic processes, managers and staging, and remove their temporary folders, as Python does at exit.

    Other child processes are left running, where Python would wait for them.
    """
    daemons = [child for child in multiprocessing.active_children() if child.daemon]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises for workers that end
    # In a thread, because multiprocessing waits forever for a queue that nobody reads. Checked in Python 3.10 to 3.13.
    as_python = multiprocessing.util._exit_function  # type: ignore[attr-defined]
    clean_up = threading.Thread(target=as_python, kwargs={"active_children": lambda: daemons}, daemon=True)
    clean_up.start()
    clean_up.join(CLEAN_UP_S)


def _fit_of(program: Program, trainer: AnyTrainer, arguments: dict[str, Any]) -> Fit:
    model = arguments["model"]
    loaders = arguments.get("train_dataloaders")
    datamodule = arguments.get("datamodule")
    ended = _ended(program, trainer, arguments.get("ckpt_path"))
    if datamodule is None and hasattr(loaders, "train_dataloader"):  # Lightning takes a data module as this argument
        return Fit(trainer=trainer, model=model, datamodule=loaders, ended=ended)
    return Fit(trainer=trainer, model=model, datamodule=datamodule, train_dataloaders=loaders, ended=ended)


def _ended(program: Program, trainer: AnyTrainer, checkpoint: object) -> str:
    """Return the sentences that name the line at which the program was ended, and the training that it would do
    next."""
    line = ""
    for frame in inspect.stack(context=0):
        if is_users(frame.filename):
            line = f" at {Path(frame.filename).name}:{frame.lineno}"
            break
    limits = {"epoch": trainer.max_epochs, "step": trainer.max_steps}
    ends = " or ".join(plural(number, word) for word, number in limits.items() if number not in (None, -1))
    how_long = f"for {ends}" if ends else "without an end"
    resumed = f" from the checkpoint {checkpoint}, which was not loaded" if checkpoint is not None else ""
    return (
        f"{program} was ended where it calls fit{line}. It would now train {how_long}{resumed}. This training, and "
        "what follows it, was not run."
    )


def _path_of(program: Program) -> Path | None:
    if program.is_module:
        return None
    path = Path(program.name).expanduser().absolute()
    if not path.is_file():
        raise SettingsError(f"There is no file {program.name}. Give SCRIPT.py, or -m package.module.")
    return path


@contextmanager
def _as_main(program: Program, path: Path | None) -> Iterator[tuple[TextIO, TextIO]]:
    """Context manager to run the program as ``__main__``. Yields copies of stdout and stderr, and restores both."""
    argv = sys.argv
    search = sys.path[:]
    folder = Path.cwd()
    streams = (_copy_of(sys.stdout), _copy_of(sys.stderr))
    sys.argv = [program.name, *program.arguments]  # the first is set by runpy
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(folder if path is None else path.resolve().parent))
    os.environ[PROGRAM] = f"{os.getpid()} {program}"
    try:
        yield streams
    finally:
        os.environ.pop(PROGRAM, None)
        sys.argv = argv
        sys.path[:] = search
        _flush_files()
        sys.stdout, sys.stderr = streams
        os.chdir(folder)


def _copy_of(stream: TextIO) -> TextIO:
    """Return a second stream to the same file, which the program cannot close; the stream itself if it has no file."""
    try:
        number = os.dup(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return stream
    return open(number, "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False)


def _refuse_ranks(program: Program) -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(1)  # rank 0 prints the error
        raise SettingsError(
            f"This is one of {ranks} processes started by torchrun or another launcher, but experiments run in one "
            f"process, on one device. Run {program} without the launcher. To "
            "compare ranks, use GPUStarvationCallback() in the run itself."
        )


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of a SystemExit. Prints its message, as Python does."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)  # noqa: T201
    return 1


def _part_of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback from the program's own first line on."""
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
