"""A run whose limit was found: what a remedy or a note is chosen by, and how it is told."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_feed.watch.stats import LoaderStats
from lightning_feed.watch.verdict.diagnosis import (
    Bottleneck,
    Cause,
    Form,
    LoopFacts,
    Measurements,
    Place,
    Remedy,
)
from lightning_feed.watch.verdict.shares import LOOP_WORDS, Shares

PLACE = Place(words="your training DataLoader")
OUR_PLACE = Place(words="loader=LoaderSettings(...) of your data module", form="settings")
"""Where nobody saw more."""
_WRAPPED = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
"""What ``wrap`` changes; the rest is set in the loader inside."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was measured of a run, and why its parts over their limits take what they take."""

    measured: Measurements
    shares: Shares
    causes: Mapping[Bottleneck, Cause]
    """Of each part of a step that is over its limit; of the step itself where none is."""

    @property
    def facts(self) -> LoopFacts:
        """What is known of the run besides its times."""
        return self.measured.facts

    @property
    def loaders(self) -> LoaderStats:
        """What the loaders did."""
        return self.measured.loaders

    @property
    def data(self) -> Cause | None:
        """Why training waits for data; None: it does not, or none of the settings of a loader bears on it."""
        return None if self.facts.dali_device is not None else self.causes.get("data")

    @property
    def start_ms(self) -> float:
        """Time to the first batch of an epoch, for each of its steps; 0.0: not known."""
        batches, start_s = self.facts.batches_per_epoch, self.measured.stats.epoch_start_s
        return 1e3 * start_s / batches if batches and start_s is not None else 0.0

    @property
    def step_with_start_ms(self) -> float:
        """Time of an epoch for each of its steps."""
        return self.shares.step_ms + self.start_ms

    @property
    def loaders_beside(self) -> int:
        """How many training loaders load side by side."""
        return max(1, len(self.facts.every_num_workers))

    @property
    def place(self) -> Place:
        """Where the training loader is set up."""
        if self.facts.place is None and not self.facts.ours:
            return replace(PLACE, words=f"your {LOOP_WORDS[self.facts.stage]} DataLoader")
        return self.facts.place or OUR_PLACE

    def can_set(self, name: str) -> bool:
        """Whether there is a way to tell a setting there."""
        return name in dict(self.place.overrides) or not self.place.names or name in dict(self.place.names)

    def can_set_with_workers(self, name: str) -> bool:
        """The same of a remedy that sets num_workers: on the command line it can set nothing that has no key there."""
        keys = dict(self.place.overrides)
        return name in keys if "num_workers" in keys else self.can_set(name)


def loader_remedy(case: Case, settings: Mapping[str, object], *, why: str, step_ms: float | None) -> Remedy:
    """A remedy that gives the training loader other settings; the first of them names it."""
    place, form = case.place, case.place.form
    name, value = next(iter(settings.items()))
    words = place.words
    keys = dict(place.overrides)
    made: Form = form
    if name in keys:
        made, words = "override", "on the command line"
        code = " ".join(f"{keys[one]}={json.dumps(given)}" for one, given in settings.items() if one in keys)
    else:
        if form == "settings" and place.inner and name not in _WRAPPED:
            made, words = "arguments", place.inner
        names = dict(place.names)
        code = ", ".join(f"{names.get(one, one)}={given!r}" for one, given in settings.items())
    now = getattr(case.facts, name, None)
    change = f"{name}: {'not set' if now is None else now} -> {value}"
    return Remedy(
        code=code,
        form=made,
        where=f"{change} {words}" if made == "override" else f"{change} in {words}",
        why=why,
        predicted_step_ms=step_ms,
        changes=f"{name}={value!r}",
    )


def trainer_remedy(place: Place, name: str, now: object, value: object, **told: Any) -> Remedy:
    """A remedy that gives the Trainer another argument; ``told``: its ``why``, and what it is predicted to give."""
    change = f"{name}: {now} -> {value}"
    form: Form = "override" if place.trainer_key else "trainer"
    where = f"{change} on the command line" if place.trainer_key else f"{change} in your Trainer"
    return Remedy(code=f"{place.trainer_key}{name}={value}", form=form, where=where, changes=f"{name}={value}", **told)


def callback_remedy(
    place: Place, module: str, kind: str, setting: tuple[str, object, object] | None, **told: Any
) -> Remedy:
    """A remedy that adds a callback to the Trainer.

    Args:
        place: of the loader, which knows of a command line.
        module: what the class is imported from.
        kind: the class.
        setting: name of its argument, what that is now, and is to be; None: none is given.
        told: as for :func:`trainer_remedy`, and ``changes``.
    """
    change = f"{setting[0]}: {setting[1]} -> {setting[2]} " if setting else ""
    if place.trainer_key:
        key = f"{place.trainer_key}callbacks"
        code = f"{key}+={module}.{kind}" + (f" {key}.{setting[0]}={setting[2]}" if setting else "")
        return Remedy(code=code, form="override", where=f"{change}on the command line", **told)
    given = f"{setting[0]}={setting[2]}" if setting else ""
    where = f"{change}in callbacks=[...] of your Trainer, with `from {module} import {kind}`"
    return Remedy(code=f"{kind}({given})", form="callback", where=where, **told)


def with_kept_workers(case: Case) -> tuple[Measurements, dict[str, object]]:
    """What was measured, with whether new workers may live on; and the setting by which they do, where it needs one."""
    facts = case.facts
    if case.place.form == "settings":  # there it is the default
        return case.measured, {}
    kept = (
        bool(facts.may_persist)
        and case.can_set_with_workers("persistent_workers")
        and "num_workers" not in dict(case.place.names)
    )
    measured = replace(case.measured, facts=replace(facts, may_persist=kept))
    return measured, {"persistent_workers": True} if kept and facts.persistent_workers is not True else {}
