"""wrap: any LightningDataModule, its loaders with workers that fit the machine."""

import functools
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from lightning_feed.dali_loaders import DaliLoaders
from lightning_feed.diagnosing.trainer import package_of
from lightning_feed.errors import SettingsError
from lightning_feed.load.recommend import Recommendation
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.wrapping_loaders import WrappedLoaders

SPLITS = ("train", "val", "test", "predict")
_OURS = "_feed_wrapped"


def wrap(datamodule: Any, loader: LoaderSettings | None = None) -> Any:
    """The same data module, whose loaders come with other workers. See ``FastDataModule.wrap``.

    The result is of a class derived from the data module's own, and shares its attributes: what one sets, the other
    has. So every hook of it runs, and nothing of Lightning's sees another data module.

    Raises:
        SettingsError: for what is no data module or chooses its loaders itself, and for settings of things that
            wrapping leaves alone.
    """
    kind: Any = type(datamodule)
    if not hasattr(datamodule, "train_dataloader") or not hasattr(datamodule, "prepare_data"):
        raise SettingsError(f"A {kind.__name__} cannot be wrapped. Give a LightningDataModule.")
    package_of(datamodule)
    if isinstance(getattr(datamodule, "_dali", None), DaliLoaders):
        raise SettingsError(
            f"{kind.__name__} loads with DALI already, in threads of DALI's own: it has no workers to choose. Train "
            "with it as it is, and give its constructor dali=DaliOptions(threads=..., prefetch=...) or device='gpu'."
        )
    if hasattr(datamodule, "loader_report"):
        raise SettingsError(
            f"{kind.__name__} chooses its loaders itself already. Give its constructor loader=LoaderSettings(...)."
        )
    wrapped = object.__new__(_class_around(kind))
    wrapped.__dict__ = datamodule.__dict__
    wrapped.__dict__[_OURS] = WrappedLoaders(loader or LoaderSettings())
    return wrapped


class _Wrapped:
    """What a wrapped data module has besides its own."""

    trainer: Any

    @property
    def recommendations(self) -> Mapping[str, Recommendation]:
        """What was chosen for each loader that was made: ``"train"``, or ``"train['key']"`` of a dict of loaders."""
        return MappingProxyType(self.__dict__[_OURS].chosen)

    def loader_report(self) -> str:
        """What was chosen for each loader that was made, and why: one line for each value."""
        text: str = self.__dict__[_OURS].report()
        return text

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so it is named by the one that it was made around. For ddp_spawn, and copies.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        if not arguments or arguments[0] is not type(self):
            return (make, arguments, *rest)
        return (_made_anew, (type(self).__mro__[_BASE], *arguments[1:]), *rest)


_BASE = 2
"""The user's class, behind the made one and ``_Wrapped``."""


def _made_anew(kind: Any, *arguments: Any) -> Any:
    made = _class_around(kind)
    return made.__new__(made, *arguments)


class _Door:
    """``train_dataloader`` and its sisters: the user's method, and then other workers.

    A data descriptor, since such a method may lie on the object, as ``LightningDataModule.from_datasets`` puts it
    there. What is set after wrapping is taken as it is: it is a tool's that wants to see or give what it says.
    """

    def __init__(self, split: str, kind: type[Any]) -> None:
        self._split, self._kind = split, kind
        self._name, self._later = f"{split}_dataloader", f"_feed_given_{split}_dataloader"

    def __get__(self, owner: Any, _: Any = None) -> Any:
        if owner is None:
            return getattr(self._kind, self._name)
        if self._later in owner.__dict__:
            return owner.__dict__[self._later]
        original = owner.__dict__.get(self._name)
        if original is None:
            original = getattr(self._kind, self._name).__get__(owner, self._kind)
        return _changing(owner, self._split, original)

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self._later] = value

    def __delete__(self, owner: Any) -> None:
        if self._later not in owner.__dict__:
            raise AttributeError(self._name)
        del owner.__dict__[self._later]


def _changing(owner: Any, split: str, original: Callable[[], Any]) -> Callable[[], Any]:
    # wraps: Lightning looks through it to find out whether the user has written the method.
    @functools.wraps(original)
    def give() -> Any:
        return owner.__dict__[_OURS].change(owner.trainer, split, original())

    return give


@cache
def _class_around(kind: Any) -> Any:
    """The class of the wrapped objects of a class. It has its name: Lightning saves a data module's state under it."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    doors = {f"{split}_dataloader": _Door(split, kind) for split in SPLITS}
    return type(kind.__name__, (_Wrapped, kind), {**names, **doors})
