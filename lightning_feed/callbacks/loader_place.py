"""Location of the call that makes the training loader, noted when it is made, and its key on the command line."""

import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

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
_HANDED_ON = re.compile(r"(.*(data|load|split).*_)?kwargs")
"""Names of parameters that take a loader's arguments as a dict, or as further arguments."""
_HOSTS = ("lightning_feed", "lightning", "pytorch_lightning", "torch")


@dataclass(frozen=True, kw_only=True)
class LoaderOrigin:
    """The place where a DataLoader was made, from the stack at that time."""

    file: str
    line: int
    function: str
    package: str
    """The package of that file; empty for the user's own code."""
    user_file: str = ""
    """The innermost of the user's own code on the stack; empty: there was none."""
    user_line: int = 0
    parameter: str = ""
    """A parameter by which its number of workers, or its arguments, can be given; empty: none was seen."""
    taker: str = ""
    """The function, or the class, that has this parameter."""
    names: tuple[tuple[str, str], ...] = ()
    """(setting, what ``taker`` calls it), where it takes the number of workers itself."""

    @property
    def at(self) -> str:
        """Its line, as users find it."""
        return source_line(self.file, self.line)

    @property
    def user_at(self) -> str:
        """The user's source line; empty if none."""
        return source_line(self.user_file, self.user_line) if self.user_file else ""


def origin_of(loader: object) -> LoaderOrigin | None:
    """The place where a loader was made; None: before this module was imported, or it is no DataLoader."""
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
    while frame is not None and not is_users(frame.f_code.co_filename):
        for held in frame.f_locals.values():
            # Lightning and accelerate make a loader out of the user's, with another sampler.
            if isinstance(held, DataLoader) and held is not loader and held.dataset is loader.dataset:
                return origin_of(held)
        on_the_way.append(frame)
        frame = frame.f_back
    maker = on_the_way[0] if on_the_way else frame
    if maker is None:
        return None
    found: dict[str, Any] = next(filter(None, (_takes(one, loader) for one in reversed(on_the_way))), {})
    if frame is not None:
        found |= {"user_file": frame.f_code.co_filename, "user_line": frame.f_lineno}
    code, package = maker.f_code, _package(maker) if on_the_way else ""
    return LoaderOrigin(file=code.co_filename, line=maker.f_lineno, function=code.co_name, package=package, **found)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _takes(frame: FrameType, loader: object) -> dict[str, Any]:
    """A function on the way, or the class of its ``self``, with the parameter by which the workers can be given."""
    if _package(frame) in _HOSTS:
        return {}
    code, owner = frame.f_code, _first_argument(frame)
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]
    found, taker = _parameter_of(parameters, frame.f_locals, loader), code.co_name
    if not found and code.co_varnames[:1] == ("self",):
        of_class = tuple(inspect.signature(type(owner)).parameters)
        found, taker = _parameter_of(of_class, getattr(owner, "__dict__", {}), loader), type(owner).__name__
    return {"taker": taker, **found} if found else {}


def _parameter_of(parameters: Sequence[str], values: Mapping[str, Any], loader: AnyLoader) -> dict[str, Any]:
    for name in WORKER_NAMES:
        # One with another value does not lead to this loader.
        if name in parameters and values.get(name, loader.num_workers) == loader.num_workers:
            others = ((one, one) for one in SETTINGS[1:] if one in parameters)
            return {"parameter": name, "names": (("num_workers", name), *others)}
    handed_on = next(filter(_HANDED_ON.fullmatch, parameters), None)
    return {"parameter": handed_on} if handed_on else {}


# --- in words -----------------------------------------------------------------------------------------------------


def loader_location(trainer: AnyTrainer, loaders: Sequence[AnyLoader]) -> Place:
    """Location of the set-up of a Trainer's training loaders.

    Args:
        trainer: in a fit, with its loaders.
        loaders: those, without their wrappers.
    """
    return place_of(_host.train_loader_source(trainer), trainer, trainer.datamodule, loaders)


def place_of(owner: object, trainer: object, data: object, loaders: Sequence[AnyLoader]) -> Place:
    """The location of that set-up outside of a fit.

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


def _words(owner: object, loaders: Sequence[AnyLoader]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The place in words, and the names of the settings there."""
    method = "" if owner is None else f"{type(owner).__name__}.train_dataloader"
    origins = [one for one in dict.fromkeys(map(origin_of, loaders)) if one is not None]
    first = origins[0] if origins else None
    if first is not None and first.names:
        made = first.user_at if first.taker != type(owner).__name__ else first.at
        call = "call of" if first.taker != type(owner).__name__ else "call that makes"
        return f"your {call} {first.taker}{_in_brackets(method, made)}", first.names
    which = "your training DataLoader" if len(loaders) < 2 else f"each of your {len(loaders)} training DataLoaders"
    given = ", which trainer.fit is given" if owner is None else ""
    return f"{which}{given}{_in_brackets(method, ' and '.join(map(_made_at, origins)))}", ()


def _in_brackets(*parts: str) -> str:
    said = ", ".join(filter(None, parts))
    return f" ({said})" if said else ""


def _made_at(origin: LoaderOrigin) -> str:
    if not origin.package:
        return origin.at
    called = f", called from {origin.user_at}" if origin.user_file else ""
    by = f", where {origin.taker}({origin.parameter}=...) may set it" if origin.parameter else ""
    return f"made in {origin.package}, {origin.at}{called}{by}"


def users_line(function: object) -> str:
    """``train.py:12`` of a function of the user's; empty for one of a library, or None."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    code = getattr(function, "__code__", None)
    return source_line(code.co_filename, code.co_firstlineno) if code and is_users(code.co_filename) else ""


# --- the command line ---------------------------------------------------------------------------------------------


def _overrides(trainer: object, loaders: Sequence[AnyLoader]) -> tuple[tuple[str, str], ...]:
    """Keys that hold the values of the loaders. Settings with no such key, or with several, are left out."""
    given, prefix = _host.cli_config(trainer), "--"
    if not given:
        given, prefix = _hydra_config(), ""
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
    hydra, omegaconf = sys.modules.get("hydra.core.hydra_config"), sys.modules.get("omegaconf")
    if hydra is None or omegaconf is None or not hydra.HydraConfig.initialized():
        return {}
    run = hydra.HydraConfig.get()
    file = Path(run.runtime.output_dir) / (run.output_subdir or ".hydra") / "config.yaml"
    if not file.is_file():
        return {}
    return dict(flat(omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file)), "."))


def flat(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, with their keys joined."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}{separator}{inner}", held) for inner, held in flat(value, separator))
        else:
            yield str(key), value
