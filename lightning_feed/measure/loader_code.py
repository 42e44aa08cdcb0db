"""The user's code that makes the training loader, and the files that are the user's."""

import ast
import inspect
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_feed.load.kinds import AnyLoader
from lightning_feed.load.loader import FeedLoader
from lightning_feed.measure.measurements import LoaderCode
from lightning_feed.wording import source_line

SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "in_order")
"""Settings that remedies change."""


def code_of(owner: object, data: object, loaders: Sequence[AnyLoader], *, config: Mapping[str, object]) -> LoaderCode:
    """Return the user's code that sets up the training loaders.

    Args:
        owner: the module or data module with ``train_dataloader``; None if the loaders are passed to ``trainer.fit``.
        data: the data module, or None.
        loaders: the training loaders, without their wrappers.
        config: the arguments of LightningCLI, by their dotted keys; empty without LightningCLI.
    """
    datamodule = type(data).__name__ if data is not None else ""
    trainer_key = "--trainer." if config else ""
    if loaders and all(isinstance(loader, FeedLoader) for loader in loaders):
        words = f"loader=LoaderSettings(...) of your {datamodule}"
        keys = _keys_of_settings(config)
        return LoaderCode(words=words, form="settings", datamodule=datamodule, overrides=keys, trainer_key=trainer_key)
    package = _package_of(owner)
    words = _words(owner, loaders, package)
    if hasattr(owner, "_feed_wrapped"):
        wrapped = f"the LoaderSettings(...) of FastDataModule.wrap({type(owner).__name__}(...), LoaderSettings(...))"
        return LoaderCode(words=wrapped, form="settings", inner=words, datamodule=datamodule)
    keys = _keys_of_loaders(config, loaders)
    if package and not keys:
        return LoaderCode(words=words, form="callback", datamodule=datamodule, trainer_key=trainer_key)
    return LoaderCode(words=words, overrides=keys, datamodule=datamodule, trainer_key=trainer_key)


def users_line(function: object) -> str:
    """Return the file and line of a user's function, such as ``train.py:12``; empty for a library function or None."""
    code = _code_of(function)
    if code is None or not is_users(code.co_filename):
        return ""
    return source_line(code.co_filename, code.co_firstlineno)


def _code_of(function: object) -> Any:
    """Return the code object of a function or method, without its decorators; None for anything else."""
    function = getattr(function, "__func__", function)
    if not callable(function):
        return None
    return getattr(inspect.unwrap(function), "__code__", None)


def _package_of(owner: object) -> str:
    """Return the package whose code makes the loader; empty if the user's own code does, or if unknown."""
    method = getattr(owner, "train_dataloader", None)
    code = _code_of(method)
    if code is None or is_users(code.co_filename) or code.co_filename.startswith("<"):
        return ""
    return str(getattr(method, "__module__", "")).partition(".")[0]


def _words(owner: object, loaders: Sequence[AnyLoader], package: str) -> str:
    kinds = {type(loader).__name__ for loader in loaders}
    kind = kinds.pop() if len(kinds) == 1 else "DataLoader"
    subject = f"your training {kind}" if len(loaders) < 2 else f"each of your {len(loaders)} training {kind}s"
    if package:
        return f"{subject} (made by {package})"
    if owner is None:
        return f"{subject} ({_only_call_of(kind) or 'passed to trainer.fit'})"
    line = users_line(getattr(owner, "train_dataloader", None))
    method = f"{type(owner).__name__}.train_dataloader"
    if line:
        return f"{subject} ({method}, {line})"
    return f"{subject} ({method})"


def _only_call_of(kind: str) -> str:
    """Return the line of the program's main file that makes a loader of a class. Empty unless there is exactly one.

    Where that class is not called, the line of webdataset's ``WebLoader``, which makes a DataLoader of its own.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not isinstance(file, str) or not is_users(file):
        return ""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(ast.unparse(call.func).rpartition(".")[2], call.lineno) for call in calls]
    lines = [line for name, line in names if name == kind] or [line for name, line in names if name == "WebLoader"]
    if len(lines) != 1:
        return ""
    return source_line(file, lines[0])


def _keys_of_settings(config: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return (setting, key) for the LoaderSettings of a data module that LightningCLI makes."""
    overrides = []
    for setting in SETTINGS:
        keys = [key for key in config if key.endswith(f"loader.{setting}")]
        if len(keys) == 1:
            overrides.append((setting, f"--{keys[0]}"))
    return tuple(overrides)


def _keys_of_loaders(config: Mapping[str, object], loaders: Sequence[AnyLoader]) -> tuple[tuple[str, str], ...]:
    """Return (setting, key) for each setting whose name and value are at exactly one key of LightningCLI's arguments.

    Returns nothing if num_workers has no such key.
    """
    numbers = {key: value for key, value in config.items() if type(value) in (int, bool)}
    overrides = []
    for setting in SETTINGS:
        values = {getattr(loader, setting, None) for loader in loaders}
        keys = [key for key, value in numbers.items() if key.rpartition(".")[2] == setting and {value} == values]
        if len(keys) == 1:
            overrides.append((setting, f"--{keys[0]}"))
    if "num_workers" not in dict(overrides):
        return ()
    return tuple(overrides)


_TORCH: tuple[str, ...] = (str(Path(torch.__file__).parent) + os.sep,)
_DEMO = str(Path(__file__).parents[1] / "demo.py")
_LIBRARIES = tuple(
    {
        # Not sys.prefix: the user's project may be inside it, such as /usr/src/app with a Python in /usr.
        *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]) + os.sep,  # and not lightning_feed_runs beside it
    }
)


def is_users(file: str) -> bool:
    """Return True for notebook cells, and for files outside Python, installed packages and this package.

    Also for the demo, which stands in for a user's program.
    """
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    if file == _DEMO:
        return True
    return not file.startswith((*_TORCH, *_LIBRARIES)) and "site-packages" not in file and "dist-packages" not in file


def is_torchs(file: str) -> bool:
    """Return True for a file of torch."""
    return file.startswith(_TORCH)
