"""The place in the user's code where the training loader is made, and the command-line key that changes it."""

import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from torch.utils.data import DataLoader

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.errors import source_line
from lightning_feed.load.kinds import AnyLoader
from lightning_feed.load.loader import FeedLoader
from lightning_feed.measure.measurements import Place
from lightning_feed.measure.user_code import is_users

SETTINGS = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "in_order")
"""Settings that remedies change."""
WORKER_NAMES = ("num_workers", "workers", "n_workers", "nworkers")
"""Names of parameters that take the number of workers."""
_TAKES_DICT = re.compile(r"(?!val|test|pred|eval).*(loader|splitter|data_?module)\w*_(kwargs|args|options|params)")
"""Names of parameters that take a loader's arguments as a dict."""
_LOADER_DICT = re.compile(r"(train_?)?(data_?)?loader")
"""Names of parameters that take a loader's arguments as a dict, but only if their default is a dict."""
_HOSTS = ("lightning_feed", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "torch", "hydra")
"""Packages that make and run loaders for the user."""


@dataclass(frozen=True, kw_only=True)
class LoaderOrigin:
    """The place where a DataLoader was made, read from the stack at that time, or where it was passed to ``fit``."""

    file: str
    line: int
    function: str
    package: str
    """Package of the file; empty for the user's own code."""
    user_file: str = ""
    """Innermost user code on the stack; empty if none."""
    user_line: int = 0
    parameter: str = ""
    """A parameter that sets the loader's number of workers or its arguments; empty if none was seen."""
    as_dict: bool = False
    """True if the parameter takes the arguments as a dict."""
    taker: str = ""
    """The function, or the class, that has this parameter."""
    names: tuple[tuple[str, str], ...] = ()
    """(setting, its name in ``taker``), if ``taker`` accepts the number of workers itself."""
    made: bool = True
    """False if the loader was made before this module was imported. The place is then the call of ``trainer.fit``."""

    @property
    def at(self) -> str:
        """File and line for the user; for a package, the path starts at its folder."""
        parts = Path(self.file).parts
        line = source_line(self.file, self.line)
        folders = parts[parts.index(self.package) : -1] if self.package in parts[:-1] else ()
        return "/".join((*folders, line))

    @property
    def user_at(self) -> str:
        """The user's file and line; empty if none."""
        return source_line(self.user_file, self.user_line) if self.user_file else ""


def origin_of(loader: object) -> LoaderOrigin | None:
    """The place where a loader was made; None if it is older than this module's import, or not a DataLoader."""
    found: LoaderOrigin | None = getattr(loader, "__dict__", {}).get("_feed_origin")
    return found


_make = DataLoader.__init__


@functools.wraps(_make)
def _make_and_note_origin(self: Any, *args: Any, **kwargs: Any) -> None:
    _make(self, *args, **kwargs)
    with suppress(Exception):  # frames hold whatever the user has
        vars(self)["_feed_origin"] = _origin_on_stack(self, sys._getframe(1))


DataLoader.__init__ = _make_and_note_origin  # type: ignore[method-assign]


def _origin_on_stack(loader: AnyLoader, frame: FrameType | None) -> LoaderOrigin | None:
    while frame is not None and _first_argument(frame) is loader:  # constructors, and wrappers around them
        frame = frame.f_back
    on_the_way: list[FrameType] = []
    while frame is not None and not _is_users(frame):
        for held in frame.f_locals.values():
            # Lightning and accelerate make a new loader from the user's, with another sampler.
            is_one = issubclass(type(held), DataLoader)  # isinstance would ask objects that may raise
            if is_one and held is not loader and held.dataset is loader.dataset:
                return origin_of(held)
        on_the_way.append(frame)
        frame = frame.f_back
    return _origin(loader, on_the_way, frame)


def _origin(loader: AnyLoader, on_the_way: Sequence[FrameType], user: FrameType | None) -> LoaderOrigin | None:
    of_packages = [one for one in on_the_way if not _has_no_file(one) and _package(one) not in _HOSTS]
    maker = next(iter(of_packages), user) or next(iter(on_the_way), None)
    if maker is None:
        return None
    found = _parameter(of_packages, loader) if of_packages else {}
    if user is not None:
        found |= {"user_file": _file(user), "user_line": user.f_lineno}
    package = _package(maker) if of_packages else ""
    return LoaderOrigin(file=_file(maker), line=maker.f_lineno, function=maker.f_code.co_name, package=package, **found)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _file(frame: FrameType) -> str:
    """The file of a frame. For a compiled package, the compiled file, because its code may name a source file that is
    not on this machine."""
    loaded = frame.f_globals.get("__file__")
    named = frame.f_code.co_filename
    return loaded if isinstance(loaded, str) and loaded.endswith((".pyc", ".so", ".pyd")) else named


def _has_no_file(frame: FrameType) -> bool:
    """True for code that ``exec`` runs, including that of dataclasses and frozen modules."""
    file = frame.f_code.co_filename
    return file.startswith("<") and not is_users(file)


def _is_users(frame: FrameType) -> bool:
    """True for the user's own code.

    Code that ``exec`` runs counts only in ``__main__``, and only if no file of the user runs it, as in notebooks that
    do not name their cells. Otherwise the line in the user's file counts.
    """
    outer: FrameType | None = frame
    while outer is not None and _has_no_file(outer):
        outer = outer.f_back
    if outer is frame:
        return is_users(_file(frame))
    return frame.f_globals.get("__name__") == "__main__" and (outer is None or not is_users(_file(outer)))


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


# --- the parameter on the way -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call on the way to a loader: of a function, or of the constructor of the object whose method runs."""

    taker: str
    parameters: Mapping[str, inspect.Parameter]
    values: Mapping[str, Any]
    """Values of its parameters, if known."""


def _parameter(frames: Sequence[FrameType], loader: AnyLoader) -> dict[str, Any]:
    """The parameter that sets the workers: looked for in the user's own call first, then in the calls inside it."""
    calls: list[_Call] = []
    for frame in reversed(frames):
        with suppress(Exception):  # other people's signatures and values may raise
            calls += _calls(frame)
    for found in (_workers, _dict, _config):
        for call in calls:
            with suppress(Exception):
                if one := found(call, loader):
                    return {"taker": call.taker, **one}
    if len(frames) == 1 and calls and _further(calls[0]):  # this one call makes the loader
        return {"taker": calls[0].taker, "parameter": _further(calls[0])}
    return {}


def _calls(frame: FrameType) -> Iterator[_Call]:
    code = frame.f_code
    owner = _first_argument(frame)
    number = code.co_argcount + code.co_kwonlyargcount
    kinds: dict[str, Any] = dict.fromkeys(code.co_varnames[:number], inspect.Parameter.KEYWORD_ONLY)
    if code.co_flags & inspect.CO_VARKEYWORDS:
        further = number + bool(code.co_flags & inspect.CO_VARARGS)
        kinds[code.co_varnames[further]] = inspect.Parameter.VAR_KEYWORD
    is_method = code.co_varnames[:1] == ("self",)
    taker = f"{type(owner).__name__}.{code.co_name}" if is_method else code.co_name
    parameters = {name: inspect.Parameter(name, kind) for name, kind in kinds.items() if name.isidentifier()}
    yield _Call(taker, parameters, frame.f_locals)  # a comprehension's argument is called `.0`
    if is_method:
        yield _Call(type(owner).__name__, _signature(type(owner)), getattr(owner, "__dict__", {}))


def _signature(kind: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class, and of the classes to which it passes ``**kwargs``."""
    found: dict[str, inspect.Parameter] = {}
    for one in kind.__mro__:
        made_by = vars(one).get("__init__")
        if not inspect.isfunction(made_by):  # written in C, or inherited
            continue
        try:
            own = inspect.signature(made_by, eval_str=True).parameters
        except (NameError, AttributeError, TypeError, ValueError, SyntaxError):  # names that only a type checker has
            own = inspect.signature(made_by).parameters
        found = {**own, **found}
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return found


def _workers(call: _Call, loader: AnyLoader) -> dict[str, Any]:
    """A parameter for the number of workers itself. With another value than the loader's, it is for another loader."""
    for name in WORKER_NAMES:
        if name in call.parameters and call.values.get(name, loader.num_workers) == loader.num_workers:
            return {"parameter": name, "names": _names(name, call.parameters)}
    return {}


def _further(call: _Call) -> str:
    """The name of a call's ``**kwargs`` parameter; empty without one."""
    kinds = {name: parameter.kind for name, parameter in call.parameters.items()}
    return next((name for name, kind in kinds.items() if kind == inspect.Parameter.VAR_KEYWORD), "")


def _names(workers: str, parameters: Mapping[str, inspect.Parameter]) -> tuple[tuple[str, str], ...]:
    return (("num_workers", workers), *((one, one) for one in SETTINGS[1:] if one in parameters))


def _dict(call: _Call, loader: AnyLoader) -> dict[str, Any]:
    """A parameter that takes a loader's arguments as a dict, or ``**kwargs`` that were seen to hold them."""
    for name, parameter in call.parameters.items():
        is_one = _TAKES_DICT.fullmatch(name) or (isinstance(parameter.default, dict) and _LOADER_DICT.fullmatch(name))
        given = call.values.get(name)
        number = given.get("num_workers", loader.num_workers) if isinstance(given, Mapping) else loader.num_workers
        if is_one and number == loader.num_workers:
            return {"parameter": name, "as_dict": parameter.kind != parameter.VAR_KEYWORD}
    further = call.values.get(_further(call))
    seen = isinstance(further, Mapping) and further.get("num_workers") == loader.num_workers
    return {"parameter": _further(call)} if seen else {}


def _config(call: _Call, loader: AnyLoader) -> dict[str, Any]:
    """A parameter for a config object whose class takes the number of workers."""
    for name, parameter in call.parameters.items():
        given = call.values.get(name)
        for kind in (type(given), *_classes(parameter.annotation)):
            if issubclass(kind, DataLoader) or kind.__module__.partition(".")[0] in (*_HOSTS, "builtins"):
                continue
            of_class = _signature(kind)
            number = getattr(given, "num_workers", loader.num_workers)
            if "num_workers" in of_class and number == loader.num_workers:
                return {"parameter": name, "taker": kind.__name__, "names": _names("num_workers", of_class)}
    return {}


def _classes(annotation: object) -> Iterator[type]:
    """The classes that an annotation names, as in ``DataConfig | str | None``."""
    if isinstance(annotation, type):
        yield annotation
    for one in get_args(annotation):
        yield from _classes(one)


# --- in words -----------------------------------------------------------------------------------------------------


def loader_location(trainer: AnyTrainer, loaders: Sequence[AnyLoader]) -> Place:
    """Location of the set-up of a Trainer's training loaders.

    Args:
        trainer: a Trainer whose fit is running.
        loaders: its training loaders, without their wrappers.
    """
    return place_of(_host.train_loader_source(trainer), trainer, trainer.datamodule, loaders)


def place_of(owner: object, trainer: object, data: object, loaders: Sequence[AnyLoader]) -> Place:
    """Location of the set-up of training loaders outside a fit. In a fit, use :func:`loader_location`.

    Args:
        owner: the module or data module with ``train_dataloader``; None if the loaders are passed to ``trainer.fit``.
        trainer: the user's Trainer.
        data: the data module, or None.
        loaders: the training loaders, without their wrappers.
    """
    datamodule = type(data).__name__ if data is not None else ""
    if loaders and all(isinstance(loader, FeedLoader) for loader in loaders):
        return Place(words=f"loader=LoaderSettings(...) of your {datamodule}", form="settings", datamodule=datamodule)
    origins = [one for one in dict.fromkeys(map(origin_of, loaders)) if one is not None]
    if not origins and owner is None and loaders:
        origins = _passed_to_fit(trainer, loaders[0])
    words = _words(owner, origins, len(loaders))
    if "_feed_wrapped" in getattr(owner, "__dict__", {}):
        wrapped = f"the LoaderSettings(...) of FastDataModule.wrap({type(owner).__name__}(...), LoaderSettings(...))"
        return Place(words=wrapped, form="settings", inner=words, datamodule=datamodule)
    overrides = _overrides(trainer, loaders)
    key = "--trainer." if trainer is not None and _host.cli_config(trainer) else ""
    place = Place(words=words, overrides=overrides, datamodule=datamodule, trainer_key=key)
    return _in_a_package(place, origins[0]) if origins and origins[0].package else place


def _passed_to_fit(trainer: object, loader: AnyLoader) -> list[LoaderOrigin]:
    """The call of ``trainer.fit``, for a loader made before this module was imported; empty if not found."""
    with suppress(Exception):  # frames hold whatever the user has
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (frame.f_code.co_name == "fit" and _first_argument(frame) is trainer):
            frame = frame.f_back
        given = _origin_on_stack(loader, frame)
        return [] if given is None else [replace(given, made=False)]
    return []


def _in_a_package(place: Place, first: LoaderOrigin) -> Place:
    """Add the parameter that leads to the package's loader. Without one, AutotuneCallback has to set the workers."""
    if first.parameter:
        return replace(place, names=first.names, argument=first.parameter if first.as_dict else "")
    return replace(place, form="callback") if first.made and not place.overrides else place


def _words(owner: object, origins: Sequence[LoaderOrigin], number: int) -> str:
    """Description of the place."""
    first = next(iter(origins), None)
    if first is not None and first.parameter:
        argument = f"{first.parameter} of " if first.as_dict else ""
        return f"{argument}your {first.taker}(...) (loader {_made_at(first)})"
    which = "your training DataLoader" if number < 2 else f"each of your {number} training DataLoaders"
    method = "" if owner is None else f"{type(owner).__name__}.train_dataloader"
    said = ", ".join(filter(None, (method, " and ".join(map(_made_at, origins)))))
    return f"{which} ({said or 'passed to trainer.fit'})"


def _made_at(origin: LoaderOrigin) -> str:
    done = "made in" if origin.made else "passed to trainer.fit in"
    if not origin.package:
        return origin.at if origin.made else f"{done} {origin.at}"
    called = f", called from your {origin.user_at}" if origin.user_file else ""
    return f"{done} {origin.at}{called}"


def users_line(function: object) -> str:
    """``train.py:12`` of a user function; empty for a library function or None."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    code = getattr(function, "__code__", None)
    return source_line(code.co_filename, code.co_firstlineno) if code and is_users(code.co_filename) else ""


# --- the command line ---------------------------------------------------------------------------------------------


def _overrides(trainer: object, loaders: Sequence[AnyLoader]) -> tuple[tuple[str, str], ...]:
    """(setting, key) for each setting with exactly one key that holds its value. Empty without ``num_workers``."""
    given = _host.cli_config(trainer)
    prefix = "--"
    if not given:
        given = _hydra_config()
        prefix = ""
    numbers = {key: value for key, value in given.items() if type(value) in (int, bool)}
    found = {}
    for setting in SETTINGS:
        values = {getattr(loader, setting, None) for loader in loaders}
        keys = [key for key, value in numbers.items() if key.rpartition(".")[2] == setting and {value} == values]
        if len(keys) == 1:
            found[setting] = f"{prefix}{keys[0]}"
    return tuple(found.items()) if "num_workers" in found else ()


def _hydra_config() -> dict[str, Any]:
    """Hydra's config by its dotted keys; empty without Hydra."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    omegaconf = sys.modules.get("omegaconf")
    if hydra is None or omegaconf is None or not hydra.HydraConfig.initialized():
        return {}
    run = hydra.HydraConfig.get()
    file = Path(run.runtime.output_dir) / (run.output_subdir or ".hydra") / "config.yaml"
    if not file.is_file():
        return {}
    return dict(_flat(omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file))))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values of nested mappings, by their keys, joined by dots."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", held) for inner, held in _flat(value))
        else:
            yield str(key), value
