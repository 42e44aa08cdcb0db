"""Tuning results as text, as JSON, as code to paste, and as hyperparameters of a run."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_feed.errors import plural
from lightning_feed.load.trials.search import Tuned
from lightning_feed.load.trials.trial import Setting, Trial
from lightning_feed.watch.verdict.diagnosis import Place

SCHEMA = "lightning_feed.tuning/1"


@dataclass(frozen=True)
class Paste:
    """One way to give a loader what was found."""

    where: str
    """In words: ``in your training DataLoader (Data.train_dataloader, data.py:41)``."""
    form: Literal["arguments", "settings", "override", "yaml"]
    """What ``code`` is: arguments of the call that makes the loader, those of ``LoaderSettings``, what is appended to
    the command line, or lines of a YAML file."""
    code: str


def tuned_text(tuned: Tuned, place: Place | None = None) -> str:
    """A table of the trials, what was chosen and why, what it predicts, and what to paste where.

    Args:
        tuned: what was found.
        place: where the loader is set up; None: not known.
    """
    per, unit = _unit(tuned)
    lines = [f"workers  ahead  {unit:>11}  start  note"]
    lines += [_row(trial, tuned, per) for trial in tuned.trials]
    lines += [f"not run: {_short(setting)}: {why}" for setting, why in tuned.rejected]
    known = "remembered, and checked now" if tuned.remembered else plural(len(tuned.trials), "trial")
    lines += ["", f"{_short(tuned.setting)}: {tuned.reason}", f"{known}, {tuned.seconds:.0f} s"]
    if tuned.batches_per_s is not None:
        lines.append(f"predicted: {tuned.batches_per_s * per:,.0f} {unit}{_starved(tuned, per, unit)}")
    lines += [f"option: {option}" for option in tuned.options]
    for one in pastes(tuned, place):
        lines += ["", f"{one.where}:", *(f"    {line}" for line in one.code.splitlines())]
    return "\n".join(lines)


def pastes(tuned: Tuned, place: Place | None) -> list[Paste]:
    """What to paste, the way that fits the place first; every way where the place is not known."""
    settings = Paste("in the call that makes your FastDataModule", "settings", paste_line(tuned))
    values = _values(tuned)
    if "workers" in values:  # threads: no DataLoader has them
        return [settings]
    if not tuned.setting.num_workers:  # beside what needs workers, torch refuses 0
        values |= {"prefetch_factor": None, "persistent_workers": False}
    if place is None:
        return [Paste("in the call that makes your training DataLoader", "arguments", _arguments(values)), settings]
    if place.form == "settings":
        return [Paste(f"in {place.words}", "settings", paste_line(tuned))]
    found, keys = [], dict(place.overrides)
    given = {name: value for name, value in values.items() if name in keys}
    if given:
        line = " ".join(f"{keys[name]}={json.dumps(value)}" for name, value in given.items())
        found.append(Paste("on the command line", "override", line))
        above = keys["num_workers"].removeprefix("--").rpartition(".")[0]
        yaml = "\n".join(f"{keys[name].rpartition('.')[2]}: {json.dumps(value)}" for name, value in given.items())
        found.append(Paste(f"or in YAML, under {above}" if above else "or in YAML", "yaml", yaml))
    names = dict(place.names)
    rest = {
        names.get(name, name): value
        for name, value in values.items()
        if name not in given and (not names or name in names)
    }
    if rest:
        found.append(Paste(f"{'and ' if given else ''}in {place.words}", "arguments", _arguments(rest)))
    return found


def paste_line(tuned: Tuned) -> str:
    """The line of code that gives a FastDataModule these settings."""
    return f"loader=LoaderSettings({_arguments(_values(tuned))})"


def _values(tuned: Tuned) -> dict[str, Any]:
    found = tuned.setting
    values: dict[str, Any] = {"num_workers": found.num_workers}
    if found.num_workers:
        if found.workers != "process":
            values["workers"] = found.workers
        values |= {"prefetch_factor": found.prefetch_factor, "persistent_workers": found.persistent_workers}
    values["pin_memory"] = found.pin_memory
    return values


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def tuned_document(tuned: Tuned, place: Place | None = None) -> dict[str, Any]:
    """For JSON, with the name of its schema. Rates are in batches per second, times in seconds."""
    plain = asdict(tuned)
    plain["rejected"] = [{"setting": asdict(setting), "why": why} for setting, why in tuned.rejected]
    per, _ = _unit(tuned)
    known = tuned.batches_per_s is not None and tuned.batch_size
    samples_per_s = (tuned.batches_per_s or 0.0) * per if known else None
    ways = [asdict(one) for one in pastes(tuned, place)]
    return {"schema": SCHEMA, **plain, "samples_per_s": samples_per_s, "code": paste_line(tuned), "paste": ways}


def _row(trial: Trial, tuned: Tuned, per: int) -> str:
    setting = trial.setting
    kind = " threads" if setting.workers == "thread" and setting.num_workers else ""
    head = f"{setting.num_workers:>7}  {setting.prefetch_factor or '-':>5}  "
    if trial.batches_per_s is None:
        return f"{head}{'-':>11}  {'-':>5}  could not run: {trial.infeasible}"
    start = f"{trial.start_s:.2f}" if trial.start_s is not None else "-"
    chosen = all(
        getattr(setting, name) == getattr(tuned.setting, name) for name in ("num_workers", "prefetch_factor", "workers")
    )
    note = f"{kind}{' <- chosen' if chosen else ''}".strip()
    return f"{head}{trial.batches_per_s * per:>11,.0f}  {start:>5}  {note}".rstrip()


def _short(setting: Setting) -> str:
    ahead = f", prefetch_factor={setting.prefetch_factor}" if setting.num_workers else ""
    return f"{plural(setting.num_workers, 'thread' if setting.workers == 'thread' else 'worker')}{ahead}"


def _unit(tuned: Tuned) -> tuple[int, str]:
    return (tuned.batch_size, "samples/s") if tuned.batch_size else (1, "batches/s")


def _starved(tuned: Tuned, per: int, unit: str) -> str:
    if tuned.starved_pct is None or tuned.demand_per_s is None:
        return "; what the model can take is not known"
    return f"; the model can take {tuned.demand_per_s * per:,.0f} {unit}, so it starves {tuned.starved_pct:.0f} %"


# --- hyperparameters -------------------------------------------------------------------------------------------------
