"""Text to paste: new settings of a loader, in the forms that fit the user's code."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_feed.measure.measurements import LoaderCode
from lightning_feed.verdict.diagnosis import Form

Settings = dict[str, object]
"""New settings of a loader, by name."""
_WRAPPED = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
"""Settings that ``FastDataModule.wrap`` changes; others are set in the wrapped data module's own loader."""


@dataclass(frozen=True)
class Paste:
    """A text to paste."""

    where: str
    """The place in words, such as ``in your training DataLoader (Data.train_dataloader, data.py:41)``."""
    form: Form | Literal["yaml"]
    """The kind of text, as of a Remedy; or lines of a YAML file."""
    code: str
    """The text."""


def pastes(loader_code: LoaderCode, settings: Settings) -> list[Paste]:
    """Return the ways to set ``settings`` together, the best first. A way may be in two parts, for two places.

    Args:
        loader_code: the user's code that sets up the loader.
        settings: the new values. The names of those that a command line has keys for come first.
    """
    if loader_code.form == "callback":
        by = "by AutotuneCallback in callbacks=[...] of the Trainer, or by LIGHTNING_FEED=tune"
        return [Paste(f"{by}, in {loader_code.words}", "callback", "AutotuneCallback()")]
    keys = dict(loader_code.overrides)
    ways = _overrides(keys, {name: value for name, value in settings.items() if name in keys})
    rest = {name: value for name, value in settings.items() if name not in keys}
    if not rest:
        return ways
    also = "and " if ways else ""
    if loader_code.inner and loader_code.form == "settings" and not set(rest) & set(_WRAPPED):
        return [*ways, Paste(f"{also}in {loader_code.inner}", "arguments", arguments(rest))]
    return [*ways, Paste(f"{also}in {loader_code.words}", loader_code.form, arguments(rest))]


def _overrides(keys: Mapping[str, str], settings: Settings) -> list[Paste]:
    """Return the settings under their keys for the command line, and for a YAML file."""
    if not settings:
        return []
    line = " ".join(f"{keys[name]}={json.dumps(value)}" for name, value in settings.items())
    above = next(iter(keys.values())).removeprefix("--").rpartition(".")[0]
    yaml = "\n".join(f"{keys[name].rpartition('.')[2]}: {json.dumps(value)}" for name, value in settings.items())
    where = f"or in YAML, under {above}" if above else "or in YAML"
    return [Paste("on the command line", "override", line), Paste(where, "yaml", yaml)]


def arguments(settings: Settings) -> str:
    """Return the settings as keyword arguments of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
