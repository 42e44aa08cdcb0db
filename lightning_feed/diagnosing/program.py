"""What is diagnosed: the user's own program, run until its first ``Trainer.fit``, or what ``module.py:NAME`` gives."""

import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from lightning_feed import _host
from lightning_feed.autoload import PROGRAM
from lightning_feed.diagnosing.safety import ProgramEnded, in_a_line
from lightning_feed.diagnosing.short_fits import plain_trainer, quiet
from lightning_feed.errors import SettingsError, plural
from lightning_feed.watch.experiments.storage import is_users

LOOPS = ("fit", "validate", "test", "predict")
MOST_ENDS = 10
"""So often a program may catch what ends it, and call the Trainer again."""
WANTED = "a LightningDataModule, or a pair of a LightningModule and a LightningDataModule"


@dataclass(frozen=True)
class Program:
    """A program of the user's."""

    name: str
    """``train.py``, or with ``is_module`` ``package.module``."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What is to be trained: what a program gave to its first ``Trainer.fit``."""

    trainer: Any
    model: Any
    """None: the loader alone."""
    datamodule: Any = None
    train_dataloaders: Any = None
    went_on: str = ""
    """What the program would have gone on with, in sentences."""


# --- a program ----------------------------------------------------------------------------------------------------


class _Ended(SystemExit):
    """Ends the program after its fit was taken over. ``except Exception`` does not catch it, ``finally`` runs."""


def run_until_fit(program: Program, take: Callable[[Fit], Any]) -> tuple[Any, Fit]:
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
                theirs = _theirs(error.__traceback__)
                if program.is_module and isinstance(error, ImportError) and theirs is None:  # not a line was reached
                    said = f"{program} cannot be run: {error}. Give SCRIPT.py, or -m package.module."
                    raise SettingsError(said) from error
                sys.excepthook(type(error), error.with_traceback(theirs), error.__traceback__)
                raise ProgramEnded(f"{program} failed before it called Trainer.fit.", 1) from error
    return taken.result(program)


class _Takeover:
    """The replaced ``fit``, and what came of it."""

    def __init__(self, take: Callable[[Fit], Any]) -> None:
        self.over = False
        """Whether the fit has been taken over."""
        self._take, self._taking, self._ends, self._pid = take, False, 0, os.getpid()
        self._found: tuple[Any, Fit] | None = None
        self._failure: BaseException | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the loops of every Trainer until the end."""
        with ExitStack() as undo:
            for package in _installed():
                for name in LOOPS:
                    undo.callback(_host.replace_in_class(package.Trainer, name, self._around))
            yield

    def result(self, program: Program) -> tuple[Any, Fit]:
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
        if self._ends > MOST_ENDS:  # `while True: try: fit() ... except:` would never end, and catches Ctrl-C too
            sys.stderr.write("lightning-feed: the program catches what ends it and trains again. It is stopped here.\n")
            sys.stderr.flush()
            os._exit(1)
        raise _Ended(0)


def _installed() -> Iterator[Any]:
    """The packages with a Trainer that the program may use."""
    for name in _host.PACKAGES.values():
        with quiet(), suppress(Exception):  # one that cannot be imported is not what the program trains with
            yield importlib.import_module(name)


def _fit_of(trainer: Any, given: dict[str, Any]) -> Fit:
    loaders, datamodule = given.get("train_dataloaders"), given.get("datamodule")
    if datamodule is None and hasattr(loaders, "train_dataloader"):  # Lightning takes it there, too
        loaders, datamodule = None, loaders
    return Fit(
        trainer=trainer,
        model=given["model"],
        datamodule=datamodule,
        train_dataloaders=loaders,
        went_on=_went_on(trainer, given.get("ckpt_path")),
    )


def _went_on(trainer: Any, checkpoint: Any) -> str:
    """Where the program was ended, and what would have come next."""
    frame = next((one for one in inspect.stack(context=0) if is_users(one.filename)), None)
    at = f" at {Path(frame.filename).name}:{frame.lineno}" if frame is not None else ""
    limits = [
        plural(number, word)
        for number, word in ((trainer.max_epochs, "epoch"), (trainer.max_steps, "step"))
        if number not in (None, -1)
    ]
    how_long = f"for {' or '.join(limits)}" if limits else "without an end"
    resumed = f" from the checkpoint {checkpoint}, which was not loaded" if checkpoint is not None else ""
    return (
        f"ended where it calls fit{at}. It would now train {how_long}{resumed}. Neither this nor anything else that "
        "follows in it was run."
    )


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


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's own first line on."""
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


# --- a target -----------------------------------------------------------------------------------------------------


def fit_of_target(text: str, accelerator: str) -> Fit:
    """Import what ``text`` names, call it where it can be called, and give what it returns, with a Trainer.

    NAME is a function or a class that needs no arguments, or an object: a data module, or a module and a data module.
    Its folder (the current one for ``package.module``) is importable from then on, and found first.

    Args:
        text: ``module.py:NAME`` or ``package.module:NAME``.
        accelerator: of the Trainer, which has one device.

    Raises:
        SettingsError: for whatever is wrong with it.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise SettingsError(
            f"TARGET {text!r} names no object in a file or module. Give module.py:NAME or package.module:NAME."
        )
    module = _import(place)
    try:
        found = attrgetter(name)(module)
        if callable(found) and _kind(found) is None:
            found = found()
    except (Exception, SystemExit) as error:
        said = f"TARGET {text!r} failed: {in_a_line(error)}. NAME is called without arguments where it can be called."
        raise SettingsError(said) from error
    model, datamodule = _pair(found, text)
    package = _host.package_of(*(one for one in (model, datamodule) if one is not None))
    try:
        trainer = plain_trainer(package, accelerator)
    except Exception as error:
        raise SettingsError(f"accelerator {accelerator!r} cannot be used here: {in_a_line(error)}.") from error
    return Fit(trainer=trainer, model=model, datamodule=datamodule)


def _import(place: str) -> ModuleType:
    folder, name, load = Path.cwd(), place, importlib.import_module
    if place.endswith(".py") or "/" in place:
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise SettingsError(f"There is no file {place}. Give module.py:NAME or package.module:NAME.")
        folder, name, load = path.parent, path.stem, partial(_from_file, path)
    sys.path.insert(0, str(folder))
    try:
        return load(name)
    except (Exception, SystemExit) as error:
        raise SettingsError(
            f"{place} could not be imported: {in_a_line(error)}. Name a file, path/to/module.py:NAME, or a module that "
            "Python finds from here, and import it yourself to see the error."
        ) from error


def _from_file(path: Path, name: str) -> ModuleType:
    """Import this very file: its name may have dots, and a package or a module of Python's may have the same."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where spawned workers look for the dataset's class
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _pair(made: Any, text: str) -> tuple[Any, Any]:
    """(module or None, data module)."""
    parts = made if isinstance(made, (tuple, list)) else [made]
    kinds = {_kind(one): one for one in parts}
    if len(parts) == len(kinds) and set(kinds) in ({"LightningDataModule"}, {"LightningModule", "LightningDataModule"}):
        return kinds.get("LightningModule"), kinds["LightningDataModule"]
    alone = " A module alone does not say what to load." if set(kinds) == {"LightningModule"} else ""
    got = ", ".join(type(one).__name__ for one in parts) or "nothing"
    raise SettingsError(f"TARGET {text!r} gives {got}.{alone} It must give {WANTED}.")


def _kind(thing: Any) -> str | None:
    """The class of Lightning's that an object is of, of either package."""
    for base in type(thing).__mro__:
        if base.__name__.startswith("Lightning") and base.__module__.partition(".")[0] in _host.PACKAGES:
            return base.__name__
    return None
