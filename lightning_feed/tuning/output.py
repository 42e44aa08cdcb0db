"""What tuning found, as text and as JSON."""

from dataclasses import asdict
from typing import Any

from lightning_feed.load.tuning.values import Setting, Trial, Tuned

SCHEMA = "lightning_feed.tuning/1"


def tuned_text(tuned: Tuned) -> str:
    """A table of the trials, what was chosen and why, what it predicts, and the line to paste."""
    per, unit = _unit(tuned)
    lines = [f"workers  ahead  {unit:>11}  start  note"]
    lines += [_row(trial, tuned, per) for trial in tuned.trials]
    lines += [f"not run: {_short(setting)}: {why}" for setting, why in tuned.rejected]
    known = "remembered, and checked now" if tuned.remembered else f"{len(tuned.trials)} trials"
    lines += ["", f"{_short(tuned.setting)}: {tuned.reason}", f"{known}, {tuned.seconds:.0f} s"]
    if tuned.batches_per_s is not None:
        lines.append(f"predicted: {tuned.batches_per_s * per:,.0f} {unit}{_starved(tuned, per, unit)}")
    lines += [f"option: {option}" for option in tuned.options]
    return "\n".join([*lines, "", paste_line(tuned)])


def paste_line(tuned: Tuned) -> str:
    """The line of code that gives a FastDataModule these settings."""
    found = tuned.setting
    values: dict[str, Any] = {"num_workers": found.num_workers}
    if found.num_workers:
        if found.workers != "process":
            values["workers"] = found.workers
        values |= {"prefetch_factor": found.prefetch_factor, "persistent_workers": found.persistent_workers}
    values["pin_memory"] = found.pin_memory
    if not found.in_order:
        values["in_order"] = False
    return f"loader=LoaderSettings({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def tuned_document(tuned: Tuned) -> dict[str, Any]:
    """For JSON, with the name of its schema. Rates are in batches per second, times in seconds."""
    plain = asdict(tuned)
    plain["rejected"] = [{"setting": asdict(setting), "why": why} for setting, why in tuned.rejected]
    per, _ = _unit(tuned)
    known = tuned.batches_per_s is not None and tuned.batch_size
    samples_per_s = (tuned.batches_per_s or 0.0) * per if known else None
    return {"schema": SCHEMA, **plain, "samples_per_s": samples_per_s, "code": paste_line(tuned)}


def _row(trial: Trial, tuned: Tuned, per: int) -> str:
    setting = trial.setting
    kind = " threads" if setting.workers == "thread" and setting.num_workers else ""
    head = f"{setting.num_workers:>7}  {setting.prefetch_factor or '-':>5}  "
    if trial.batches_per_s is None:
        return f"{head}{'-':>11}  {'-':>5}  could not run: {trial.infeasible}"
    start = f"{trial.start_s:.2f}" if trial.start_s is not None else "-"
    same = ("num_workers", "prefetch_factor", "workers", "in_order")
    chosen = all(getattr(setting, name) == getattr(tuned.setting, name) for name in same)
    order = "" if setting.in_order else " in_order=False"
    note = f"{kind}{order}{' <- chosen' if chosen else ''}".strip()
    return f"{head}{trial.batches_per_s * per:>11,.0f}  {start:>5}  {note}".rstrip()


def _short(setting: Setting) -> str:
    kind = "threads" if setting.workers == "thread" else "workers"
    ahead = f", prefetch_factor={setting.prefetch_factor}" if setting.num_workers else ""
    return f"{setting.num_workers} {kind}{ahead}"


def _unit(tuned: Tuned) -> tuple[int, str]:
    return (tuned.batch_size, "samples/s") if tuned.batch_size else (1, "batches/s")


def _starved(tuned: Tuned, per: int, unit: str) -> str:
    if tuned.starved_pct is None or tuned.demand_per_s is None:
        return "; what the model can take is not known"
    return f"; the model can take {tuned.demand_per_s * per:,.0f} {unit}, so it starves {tuned.starved_pct:.0f} %"
