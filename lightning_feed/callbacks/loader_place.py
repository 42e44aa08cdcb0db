"""Where the user's program sets up the training loader: the call, the argument, the key on the command line."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed.errors import source_line
from lightning_feed.load.loader import FeedLoader
from lightning_feed.watch.verdict.diagnosis import Place

SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "in_order")
"""What remedies set."""
OTHER_NAMES = {"num_workers": ("workers", "n_workers", "nworkers")}
"""What functions that make loaders call them."""
_LOADERS = ("DataLoader", "WebLoader", "StatefulDataLoader", "StreamingDataLoader")
"""Classes that may be imported where nobody can look them up."""
_HOSTS = ("lightning_feed", "lightning", "pytorch_lightning", "torch")
_DEEPEST = 3
"""Functions of the user's that are followed to the call."""


@dataclass(frozen=True)
class _Call:
    """A call that makes a loader."""

    at: str
    """``data.py:41``."""
    name: str
    """What is called."""
    names: tuple[tuple[str, str], ...] = ()
    """As in :class:`Place`; empty for a loader class."""


@dataclass(frozen=True)
class _Sought:
    """What is looked for: the calls that make these loaders."""

    owner: Any
    """Has the ``train_dataloader``; None where ``trainer.fit`` is given the loaders."""
    num_workers: set[Any]
    """Of the loaders; None among them: of one that has no such number."""


def find_place(trainer: Any, loaders: Sequence[Any]) -> Place:
    """Where the training loaders of a Trainer are set up.

    Args:
        trainer: in a fit, with its loaders.
        loaders: those, without their wrappers.
    """
    return place_of(_host.train_loader_source(trainer), trainer, trainer.datamodule, loaders)


def place_of(owner: Any, trainer: Any, data: Any, loaders: Sequence[Any]) -> Place:
    """The same outside of a fit.

    Args:
        owner: the module or data module with the ``train_dataloader``; None where ``trainer.fit`` is given the loaders.
        trainer: the user's.
        data: the data module, or None.
        loaders: those for training, without their wrappers.
    """
    datamodule = type(data).__name__ if data is not None else ""
    if loaders and all(isinstance(loader, FeedLoader) for loader in loaders):
        return Place(words=f"loader=LoaderSettings(...) of your {datamodule}", form="settings", datamodule=datamodule)
    words, names = _words(owner, loaders)
    if "_feed_wrapped" in getattr(owner, "__dict__", {}):
        wrapped = f"the LoaderSettings(...) of FastDataModule.wrap({type(owner).__name__}(...), LoaderSettings(...))"
        return Place(words=wrapped, form="settings", inner=words, datamodule=datamodule)
    overrides = _overrides(trainer, loaders)
    key = "--trainer." if trainer is not None and _host.cli_config(trainer) else ""
    return Place(words=words, names=names, overrides=overrides, datamodule=datamodule, trainer_key=key)


def _words(owner: Any, loaders: Sequence[Any]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The place in words, and what the settings are called there."""
    which = "your training DataLoader" if len(loaders) < 2 else f"each of your {len(loaders)} training DataLoaders"
    method = getattr(owner, "train_dataloader", None)
    sought = _Sought(owner, {getattr(loader, "num_workers", None) for loader in loaders})
    found = _given_to_fit(sought) if owner is None else _calls(method, sought, _DEEPEST)
    calls = list(dict.fromkeys(found))
    where = "" if owner is None else f"{type(owner).__name__}.train_dataloader"
    places = " and ".join(call.at for call in calls) or _line_of(method)
    inside = ", ".join(filter(None, (where, places)))
    inside = f" ({inside})" if inside else ""
    if calls and (calls[0].names or calls[0].name not in _LOADERS):
        return f"your call of {calls[0].name}{inside}", calls[0].names
    return f"{which}{', which trainer.fit is given' if owner is None else ''}{inside}", ()


# --- the call -----------------------------------------------------------------------------------------------------


def _calls(function: Any, sought: _Sought, deeper: int) -> Iterator[_Call]:
    """The calls in a function, and in functions of the user's that it calls, that make a loader."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
    function = getattr(function, "__func__", function)
    if function is None or not hasattr(function, "__code__") or not _of_the_user(function):
        return
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):  # made by exec, or in a notebook that has gone on
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = _look_up(node.func, function, sought.owner)
            at = source_line(function.__code__.co_filename, first + node.lineno - 1)
            yield from _made_by(node, called, at, sought, deeper)


def _made_by(node: ast.Call, called: Any, at: str, sought: _Sought, deeper: int) -> Iterator[_Call]:
    """This call, where it makes a loader; else those in the function that it calls."""
    found = _as_call(node, called, at, sought)
    if found is not None:
        yield found
    elif deeper and not isinstance(called, type):
        yield from _calls(called, sought, deeper - 1)


def _as_call(node: ast.Call, called: Any, at: str, sought: _Sought) -> _Call | None:
    last = ast.unparse(node.func).rpartition(".")[2]
    if isinstance(called, type):
        is_loader = issubclass(called, DataLoader) or called.__name__ in _LOADERS
        return _Call(at, called.__name__ if called.__name__ in _LOADERS else last) if is_loader else None
    if called is None:
        return _Call(at, last) if last in _LOADERS else None
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return None
    names = tuple(
        (setting, one)
        for setting in SETTINGS
        for one in (setting, *OTHER_NAMES.get(setting, ()))
        if one in signature.parameters
    )
    if not names or names[0][0] != "num_workers":
        return None
    given = _given(node, signature, names[0][1])
    # A number that the loaders do not have: the function makes nothing of it.
    return _Call(at, last, names) if given is None or sought.num_workers & {given, None} else None


def _given(node: ast.Call, signature: inspect.Signature, name: str) -> int | None:
    """The number that a call gives an argument, or leaves it to have; None: it cannot be told."""
    if any(isinstance(one, ast.Starred) for one in node.args) or any(word.arg is None for word in node.keywords):
        return None
    owner = [None] if "self" in signature.parameters else []
    try:
        bound = signature.bind_partial(*owner, *node.args, **{str(word.arg): word.value for word in node.keywords})
    except TypeError:  # not a call of what the name stands for now
        return None
    value = bound.arguments.get(name, signature.parameters[name].default)
    value = value.value if isinstance(value, ast.Constant) else value
    return value if type(value) is int else None


def _look_up(node: ast.expr, function: Callable[..., Any], owner: Any) -> Any:
    """What a name in a function stands for: a global, what it closes over, or an attribute; None: it cannot be told."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return inspect.getattr_static(type(owner), node.attr, None)
    scope = inspect.getclosurevars(function)
    return _look_up_in(node, {**scope.globals, **scope.nonlocals})


def _look_up_in(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    inner = _look_up_in(node.value, scope) if isinstance(node, ast.Attribute) else None
    return getattr(inner, node.attr, None) if isinstance(node, ast.Attribute) and inspect.ismodule(inner) else None


def _of_the_user(function: Any) -> bool:
    return _is_a_users(function.__code__.co_filename, str(getattr(function, "__module__", "")))


def _line_of(function: Any) -> str:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else source_line(code.co_filename, code.co_firstlineno)


def users_line(function: Any) -> str:
    """``train.py:12`` of a function of the user's; empty for one of a library, or none."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    return _line_of(function) if hasattr(function, "__code__") and _of_the_user(function) else ""


def _given_to_fit(sought: _Sought) -> Iterator[_Call]:
    """The calls that make what ``trainer.fit`` is given, where the function that calls it makes it."""
    frame: Any = sys._getframe(1)
    while frame is not None and not ("fit" in frame.f_code.co_names and _of_a_user(frame)):
        frame = frame.f_back
    if frame is None:
        return
    try:
        lines, first = inspect.getsourcelines(frame)  # of a module's frame all lines, of its code the first
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return
    made = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        for given in _loaders_of_fit(call) if isinstance(call, ast.Call) else ():
            node = made.get(given.id, given) if isinstance(given, ast.Name) else given
            if not isinstance(node, (ast.Name, ast.Call)):
                continue
            at, calls = source_line(frame.f_code.co_filename, max(first, 1) + node.lineno - 1), []
            if isinstance(node, ast.Call):
                called = _look_up_in(node.func, {**frame.f_globals, **frame.f_locals})
                calls = list(_made_by(node, called, at, sought, _DEEPEST))
            # Where what makes it cannot be told, the line that hands it on.
            yield from calls or [_Call(at, _LOADERS[0])]


def _of_a_user(frame: Any) -> bool:
    return _is_a_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))


def _loaders_of_fit(call: ast.Call) -> list[ast.expr]:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "fit":
        return []
    named = [word.value for word in call.keywords if word.arg == "train_dataloaders"]
    return named or call.args[1:2]


def _is_a_users(file: str, module: str) -> bool:
    libraries = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not libraries and module.partition(".")[0] not in _HOSTS


# --- the command line ---------------------------------------------------------------------------------------------


def _overrides(trainer: Any, loaders: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Keys that hold what the loaders have. A setting that no key, or more than one, can be meant by is left out."""
    given, prefix = _host.cli_config(trainer), "--"
    if not given:
        given, prefix = _hydra_config(), ""
    found = []
    for setting in SETTINGS:
        values = {getattr(loader, setting, None) for loader in loaders}
        keys = [
            key
            for key, value in given.items()
            if key.rpartition(".")[2] == setting and type(value) in (int, bool) and {value} == values
        ]
        if len(keys) == 1:
            found.append((setting, f"{prefix}{keys[0]}"))
    return tuple(found) if found and found[0][0] == "num_workers" else ()


def _hydra_config() -> dict[str, Any]:
    """What Hydra was called with, by its dotted keys; empty where it was not."""
    hydra, omegaconf = sys.modules.get("hydra.core.hydra_config"), sys.modules.get("omegaconf")
    if hydra is None or omegaconf is None or not hydra.HydraConfig.initialized():
        return {}
    run = hydra.HydraConfig.get()
    file = Path(run.runtime.output_dir) / (run.output_subdir or ".hydra") / "config.yaml"
    if not file.is_file():
        return {}
    return dict(_flat(omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file)), ""))


def _flat(value: Any, before: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield before, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{before}.{key}" if before else str(key))
