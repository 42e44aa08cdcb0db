"""The user's own program, run as Python runs it until its first ``Trainer.fit``, which is taken over."""

import ast
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from lightning_feed import _host
from lightning_feed.autoload import PROGRAM
from lightning_feed.diagnosing.failure import is_theirs
from lightning_feed.diagnosing.outcomes import ProgramEnded
from lightning_feed.diagnosing.trainer import PACKAGES, Package, quiet
from lightning_feed.errors import SettingsError

Result = TypeVar("Result")
LOOPS = ("fit", "validate", "test", "predict")
MOST_ENDS = 10
"""So often a program may catch what ends it, and call the Trainer again."""


@dataclass(frozen=True)
class Program:
    """What is to be run."""

    name: str
    """``train.py``, or with ``is_module`` ``package.module``."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a program gave to its first ``Trainer.fit``."""

    trainer: Any
    model: Any
    datamodule: Any = None
    train_dataloaders: Any = None
    went_on: str = ""
    """What the program would have gone on with, in sentences."""


class _Ended(SystemExit):
    """Ends the program after its fit was taken over. ``except Exception`` does not catch it, ``finally`` runs."""


def run_until_fit(program: Program, take: Callable[[Fit], Result]) -> tuple[Result, Fit]:
    """Run a program, call ``take`` in the place of its first ``Trainer.fit``, and end the program there.

    The program runs in this process as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``, and with the fit of
    ``lightning.pytorch`` and ``pytorch_lightning`` replaced. These are afterwards as before, and so is the current
    folder. An error of ``take`` ends the program too, and is raised when it has ended.

    Args:
        program: what to run.
        take: called within the program, where it calls ``fit``.

    Raises:
        SettingsError: there is no such program, or this process is one of several ranks.
        ProgramEnded: it ended before it called ``fit``. The traceback of an error has been printed.
    """
    _refuse_ranks(program)
    path = _path_of(program)
    taken = _Takeover(take)
    with _as_main(program, path), taken.in_place():
        try:
            if program.is_module:
                runpy.run_module(program.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")
        except _Ended:
            pass
        except SystemExit as end:
            if not taken.over:
                raise _ended_early(program, end) from end
        except Exception as error:
            # After the fit it may fail of having been ended; what was found counts.
            if not taken.over:
                _refuse_missing(program, error)
                sys.excepthook(type(error), error.with_traceback(_theirs(error.__traceback__)), error.__traceback__)
                raise ProgramEnded(f"{program} failed before it called Trainer.fit.", 1) from error
    return taken.result(program)


class _Takeover(Generic[Result]):
    """The replaced ``fit``, and what came of it."""

    def __init__(self, take: Callable[[Fit], Result]) -> None:
        self.over = False
        """Whether the fit has been taken over."""
        self._take, self._taking, self._ends, self._pid = take, False, 0, os.getpid()
        self._found: tuple[Result, Fit] | None = None
        self._failure: BaseException | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the loops of every Trainer until the end."""
        with ExitStack() as undo:
            for package in _installed():
                for name in LOOPS:
                    undo.callback(_host.replace_in_class(package.root.Trainer, name, self._around))
            yield

    def result(self, program: Program) -> tuple[Result, Fit]:
        """What ``take`` gave, after the program has ended."""
        if self._failure is not None:
            raise self._failure
        if self._found is None:
            given = " ".join(program.arguments) or "none"
            raise ProgramEnded(
                f"{program} ran to its end and never called Trainer.fit in this process, so there is nothing to look "
                f"at. Its arguments were: {given}. Give those that it trains with, after two dashes: lightning-feed "
                f"diagnose {program} -- ARGS. If it trains in another process, name the program that runs there.",
                1,
            )
        return self._found

    def _around(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._taking or (not self.over and original.__name__ != "fit"):
            return original(trainer, *args, **kwargs)
        if os.getpid() != self._pid:
            raise SystemExit(
                "lightning-feed: the program called Trainer.fit in a process that it had forked, where it is not taken "
                "over. Nothing was trained there."
            )
        if not self.over:
            fit = _fit_of(trainer, _host.arguments_of(original, trainer, args, kwargs))
            self.over = self._taking = True
            try:
                self._found = self._take(fit), fit
            except BaseException as error:  # noqa: BLE001  # raised when the program, which may catch it, has ended
                self._failure = error
            finally:
                self._taking = False
        self._ends += 1
        if self._ends > MOST_ENDS:
            sys.stderr.write("lightning-feed: the program catches what ends it and trains again. It is stopped here.\n")
            sys.stderr.flush()
            os._exit(1)
        raise _Ended(0)


def _installed() -> Iterator[Package]:
    """The packages with a Trainer that the program may use."""
    for top, name in PACKAGES.items():
        if importlib.util.find_spec(top) is None:
            continue
        with quiet():
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001  # one that cannot be imported is not what the program trains with
                continue
        yield Package(name)


def _fit_of(trainer: Any, given: dict[str, Any]) -> Fit:
    loaders, datamodule = given.get("train_dataloaders"), given.get("datamodule")
    if datamodule is None and hasattr(loaders, "train_dataloader"):  # Lightning takes it there, too
        loaders, datamodule = None, loaders
    frames = [frame for frame in _stack() if is_theirs(frame.f_code.co_filename)]
    return Fit(
        trainer=trainer,
        model=given["model"],
        datamodule=datamodule,
        train_dataloaders=loaders,
        went_on=_went_on(trainer, given.get("ckpt_path"), frames),
    )


# --- what would come next -----------------------------------------------------------------------------------------


def _went_on(trainer: Any, checkpoint: Any, frames: list[FrameType]) -> str:
    at = f" at {_place(frames[0])}" if frames else ""
    resumed = f" from the checkpoint {checkpoint}, which was not loaded" if checkpoint is not None else ""
    calls = [call for frame in frames for call in _calls_after(frame)]
    then = f", then call {', '.join(calls)}" if calls else ""
    return (
        f"ended where it calls fit{at}. It would now train {_how_long(trainer)}{resumed}{then}. Neither this nor "
        "anything else that follows in it was run."
    )


def _how_long(trainer: Any) -> str:
    epochs, steps = trainer.max_epochs, trainer.max_steps
    limits = [
        f"{number} {word}{'' if number == 1 else 's'}"
        for number, word in ((epochs, "epoch"), (steps, "step"))
        if number not in (None, -1)
    ]
    return f"for {' or '.join(limits)}" if limits else "without an end"


def _calls_after(frame: FrameType) -> list[str]:
    """Calls of a Trainer's loops that stand behind the line where ``frame`` is now, in the same function."""
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    scope: Any = tree
    if frame.f_code.co_name != "<module>":
        lines = (frame.f_code.co_firstlineno, frame.f_lineno)
        inside = (
            one
            for one in ast.walk(tree)
            if isinstance(one, functions)
            and one.name == frame.f_code.co_name
            and one.lineno <= lines[1] <= (one.end_lineno or 0)
        )
        scope = max(inside, key=lambda one: one.lineno, default=None)
    todo, found = list(scope.body) if scope is not None else [], []
    while todo:
        node = todo.pop()
        if isinstance(node, (*functions, ast.ClassDef, ast.Lambda)):
            continue
        todo.extend(ast.iter_child_nodes(node))
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in LOOPS and called.lineno > frame.f_lineno:
            found.append((called.lineno, ast.unparse(called)))
    name = Path(frame.f_code.co_filename).name
    return [f"{text} ({name}:{line})" for line, text in sorted(found)]


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# --- as Python runs it --------------------------------------------------------------------------------------------


def _path_of(program: Program) -> Path | None:
    if program.is_module:
        return None
    path = Path(program.name).expanduser()
    if not path.is_file():
        raise SettingsError(f"There is no file {program.name}. Give SCRIPT.py, or -m package.module.")
    return path.absolute()


@contextmanager
def _as_main(program: Program, path: Path | None) -> Iterator[None]:
    argv, search, folder = sys.argv, sys.path[:], Path.cwd()
    sys.argv = [program.name, *program.arguments]  # the first is set by runpy
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(folder if path is None else path.resolve().parent))
    os.environ[PROGRAM] = f"{os.getpid()} {program}"
    try:
        yield
    finally:
        os.environ.pop(PROGRAM, None)
        sys.argv, sys.path[:] = argv, search
        os.chdir(folder)


def _refuse_ranks(program: Program) -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(1)  # the first says it for all
        raise SettingsError(
            f"This is one of {ranks} processes that torchrun, or another launcher, has started, and experiments "
            f"are made in one, on one device. Run it without the launcher: lightning-feed diagnose {program} -- ARGS. "
            "What ranks cost each other, GPUStarvationCallback() measures in the run itself."
        )


def _ended_early(program: Program, end: SystemExit) -> ProgramEnded:
    if end.code is not None and not isinstance(end.code, int):
        print(end.code, file=sys.stderr)  # noqa: T201  # as Python does
    code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return ProgramEnded(f"{program} ended by an exit with {code} before it called Trainer.fit.", code or 1)


def _refuse_missing(program: Program, error: Exception) -> None:
    """The module that was to be run is missing itself, or is none that can be run: no line of it was reached."""
    if program.is_module and isinstance(error, ImportError) and _theirs(error.__traceback__) is None:
        raise SettingsError(f"{program} cannot be run: {error}. Give SCRIPT.py, or -m package.module.") from error


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's own first line on."""
    while trace is not None and not is_theirs(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
