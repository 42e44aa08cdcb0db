"""The package that an object comes from, and whether a hook is the user's or Lightning's empty one."""

from importlib import import_module
from types import ModuleType

from lightning_feed.errors import SettingsError

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""The public module of each of Lightning's packages, by the package's name."""


def package_of(first: object, *others: object) -> ModuleType:
    """Return the package that a Trainer, a module or a data module comes from: ``lightning.pytorch`` or
    ``pytorch_lightning``.

    Raises:
        SettingsError: an object is a class or comes from neither package, or ``others`` come from another package than
            ``first``: the packages do not accept each other's objects.
    """
    if isinstance(first, type):
        raise SettingsError(f"{first.__name__} is a class. Pass an object of this class: {first.__name__}(...).")
    package = package_of_class(type(first))
    if package is None:
        raise SettingsError(
            f"{type(first).__module__}.{type(first).__qualname__} comes from neither lightning.pytorch nor "
            "pytorch_lightning. Give a Trainer, a LightningModule and a LightningDataModule of one of them."
        )
    for other in others:
        other_package = package_of(other).__name__
        if other_package != PACKAGES[package]:
            raise SettingsError(
                f"{type(first).__name__} comes from {PACKAGES[package]} and {type(other).__name__} from "
                f"{other_package}, but neither package accepts the other's objects. Import both from one package."
            )
    return import_module(PACKAGES[package])


def package_of_class(kind: type) -> str | None:
    """Return the package (a key of ``PACKAGES``) that defines a class or one of its bases; None if neither package
    does."""
    packages = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((package for package in packages if package in PACKAGES), None)


def defined_by_lightning(thing: object) -> bool:
    """Check if a class, object or function comes from Lightning or from this package."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0] in (*PACKAGES, "lightning_feed")


def is_overridden(owner: object, hook: str) -> bool:
    """Check if the user's module or callback overrides Lightning's empty ``hook``."""
    method = getattr(owner, hook, None)
    return method is not None and not defined_by_lightning(getattr(method, "__wrapped__", method))


def has_class(thing: object, *names: str) -> bool:
    """Check like ``isinstance``, but by class names, which are the same in both of Lightning's packages."""
    return any(kind.__name__ in names for kind in type(thing).__mro__)
