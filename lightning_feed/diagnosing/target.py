"""``module.py:factory`` or ``package.module:factory``: what to diagnose, made by the user's own code."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_feed.diagnosing.failure import in_a_line
from lightning_feed.diagnosing.trainer import PACKAGES, package_of, package_of_all, quiet
from lightning_feed.errors import SettingsError

FORM = "Give module.py:NAME or package.module:NAME"
WANTED = "a LightningDataModule, or a pair of a LightningModule and a LightningDataModule"


@dataclass(frozen=True)
class Target:
    """What is to be diagnosed."""

    model: Any
    """None: the loader alone."""
    datamodule: Any


@contextmanager
def open_target(text: str) -> Iterator[Target]:
    """Import what ``text`` names, call it where it can be called, and give what it returns.

    NAME is a function or a class that needs no arguments, or an object: a data module, or a module and a data module.
    Its folder (the current one for ``package.module``) is importable until the end, and found first; ``sys.path`` is as
    before then.

    Raises:
        SettingsError: for whatever is wrong with it.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise SettingsError(f"TARGET {text!r} names no object in a file or module. {FORM}.")
    before = sys.path[:]
    try:
        module = _from_file(place) if place.endswith(".py") or "/" in place else _from_name(place)
        yield _as_target(_made(_object(module, name, text), text), text)
    finally:
        sys.path[:] = before


def trainer_for(target: Target, accelerator: str) -> Any:
    """A Trainer on one device for a target, from the package that its data module comes from.

    Raises:
        SettingsError: when there is no such accelerator here.
    """
    root = package_of(target.datamodule).root
    try:
        with quiet():
            return root.Trainer(accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False)
    except Exception as error:
        raise SettingsError(f"accelerator {accelerator!r} cannot be used here: {in_a_line(error)}.") from error


def _from_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        near = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise SettingsError(f"There is no file {place}.{_did_you_mean(path.name, near)} {FORM}.")
    sys.path.insert(0, str(path.parent))
    # Workers that are spawned look for the data set's class under the name of the file.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{place} is no Python file. {FORM}.")
    module = importlib.util.module_from_spec(spec)
    shadowed = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(path.stem)
        if shadowed is not None:
            sys.modules[path.stem] = shadowed
        raise SettingsError(
            f"{place} could not be imported: {in_a_line(error)}. Run `python {place}` to see it."
        ) from error
    return module


def _from_name(place: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise SettingsError(
                f"There is no module {error.name!r} to import. Name one that Python finds from here, or a file: "
                "path/to/module.py:NAME."
            ) from error
        raise SettingsError(f"{place} could not be imported: {in_a_line(error)}.") from error
    except (Exception, SystemExit) as error:
        raise SettingsError(
            f"{place} could not be imported: {in_a_line(error)}. Run `python -c 'import {place}'` to see it."
        ) from error


def _object(module: ModuleType, name: str, text: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [one for one in vars(found) if not one.startswith("_")] if hasattr(found, "__dict__") else []
            raise SettingsError(f"TARGET {text!r}: there is no {part!r} in it.{_did_you_mean(part, public)}")
        found = getattr(found, part)
    return found


def _made(found: Any, text: str) -> Any:
    """Call a function or class; anything else is taken as it is."""
    if not callable(found) or _is_a(found, "LightningModule") or _is_a(found, "LightningDataModule"):
        return found
    missing = _missing_arguments(found)
    if missing:
        raise SettingsError(
            f"TARGET {text!r} needs arguments that it is not given: {', '.join(missing)}. Write a function that takes "
            f"none and returns {WANTED}."
        )
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise SettingsError(f"TARGET {text!r} failed when it was called: {in_a_line(error)}.") from error


def _missing_arguments(called: Any) -> list[str]:
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in optional]


def _as_target(made: Any, text: str) -> Target:
    if _is_a(made, "LightningDataModule"):
        return Target(None, made)
    if isinstance(made, (tuple, list)) and len(made) == 2:
        model, data = made if _is_a(made[0], "LightningModule") else made[::-1]
        if _is_a(model, "LightningModule") and _is_a(data, "LightningDataModule"):
            package_of_all([model, data])
            return Target(model, data)
    alone = " A module alone does not say what to load." if _is_a(made, "LightningModule") else ""
    kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, (tuple, list)) else ""
    got = (
        f"a {type(made).__name__} of {kinds or 'nothing'}"
        if isinstance(made, (tuple, list))
        else f"a {type(made).__name__}"
    )
    raise SettingsError(f"TARGET {text!r} gives {got}.{alone} It must give {WANTED}.")


def _is_a(thing: Any, kind: str) -> bool:
    """Whether an object is of Lightning's class ``kind``, of either package."""
    return any(base.__name__ == kind and base.__module__.partition(".")[0] in PACKAGES for base in type(thing).__mro__)


def _did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
