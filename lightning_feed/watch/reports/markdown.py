"""The report as Markdown: ``feed_report.md``, and what loggers show as text."""

import re
from collections.abc import Iterable, Iterator

from lightning_feed.errors import printable
from lightning_feed.watch.reports.compare_text import check_text
from lightning_feed.watch.reports.report import Report, rate
from lightning_feed.watch.reports.road import in_rate, read_road, road_text
from lightning_feed.watch.reports.tables import tables
from lightning_feed.watch.reports.text import cause_text, headline, if_free, interval, part_name, step_parts
from lightning_feed.watch.verdict.diagnosis import Diagnosis
from lightning_feed.watch.verdict.shares import in_ms, plural, toy_sentence

MEANING = {
    "compute": "forward, backward and optimizer",
    "data": "the device waited for data",
    "h2d": "as far as no computing hides it, with the hooks on the way",
    "other": "between the steps: callbacks, logging, checkpoints",
}
"""The parts of a step, for people."""


def as_markdown(report: Report) -> str:
    """The whole report: verdict, step, causes, remedies, earlier predictions, pipeline, ranks, hooks, versions."""
    return "\n\n".join((diagnosis_markdown(report.diagnosis), *_rest(report))) + "\n"


def diagnosis_markdown(diagnosis: Diagnosis) -> str:
    """The verdict, the step and the remedies: short enough for a logger's text."""
    stats = diagnosis.stats
    blocks = [f"# {_text(headline(diagnosis))}"]
    trust = f"Confidence {diagnosis.confidence}, {plural(stats.steps, 'step')}"
    known = interval(diagnosis)
    if known is not None:
        trust += f", 95 % interval {known.replace('-', ' to ')} %"
    blocks.append(f"{trust}.")
    if stats.step_ms:
        blocks.append(_table(("part of the step", "ms", "%", ""), _step_rows(diagnosis, stats.step_ms)))
    if toy_sentence(stats.step_ms) is not None:
        return "\n\n".join(blocks)
    free = if_free(diagnosis)
    if free:
        blocks.append(f"{free[0].upper()}{free[1:]}.")
    why = [cause_text(diagnosis), *diagnosis.evidence]
    lines = [f"- {_text(one)}" for one in why if one]
    if lines:
        blocks.append("## Why\n\n" + "\n".join(lines))
    if diagnosis.remedies:
        header = ("", "change", "why", "predicted step", "predicted rate")
        blocks.append("## What to change\n\n" + _table(header, _remedy_rows(diagnosis)))
    besides = (*diagnosis.why_not, *diagnosis.notes)
    if besides:
        blocks.append("## Notes\n\n" + "\n".join(f"- {_text(one)}" for one in besides))
    return "\n\n".join(blocks)


def _step_rows(diagnosis: Diagnosis, whole: float) -> Iterator[tuple[str, ...]]:
    for name, ms in step_parts(diagnosis):
        share = "" if ms is None else f"{100 * ms / whole:.1f}"
        yield part_name(name), in_ms(ms, whole), share, MEANING[name]
    yield "**step**", f"**{in_ms(whole, whole)}**", "", ""


def _remedy_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, ...]]:
    size = diagnosis.measurements.facts.batch_size
    for number, one in enumerate(diagnosis.remedies, 1):
        predicted = one.predicted_step_ms
        per_s = rate(predicted, size)
        yield (
            str(number),
            _code(one.code),
            _text(f"{one.where}: {one.why}" if one.where else one.why),
            "" if predicted is None else f"{in_ms(predicted, diagnosis.stats.step_ms or predicted)} ms",
            "" if per_s is None else f"{in_rate(per_s)} samples/s",
        )


def _rest(report: Report) -> Iterator[str]:
    measured = report.diagnosis.measurements
    if report.report_card:
        lines = "\n".join(f"- {_text(check_text(one))}" for one in report.report_card)
        yield f"## What was predicted\n\n{lines}"
    road = read_road(report.diagnosis)
    if road is not None:
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", road_text(road))), default=0))
        yield f"## Pipeline\n\n{fence}text\n{road_text(road)}\n{fence}"
    for found in tables(measured):
        rows = ((_code(first), *map(_text, others)) for first, *others in found.rows)
        yield f"## {_text(found.title)}\n\n{_table(found.header, rows)}"
    yield "## Run\n\n" + _table(("", ""), ((name, _text(value)) for name, value in run_rows(report)))


def run_rows(report: Report) -> list[tuple[str, str]]:
    """(what, value) of the run and its machine, as far as they are known."""
    facts, where = report.diagnosis.measurements.facts, report.environment
    size = facts.batch_bytes
    rows = (
        ("written", report.written_at),
        ("device", where.device or facts.device_type),
        ("CPU", where.cpu),
        ("usable CPUs", where.usable_cpus if facts.usable_cpus is None else facts.usable_cpus),
        ("ranks", facts.world_size),
        ("batch", _batch(facts.batch_size, None if size is None else size / 1e6)),
        ("workers", facts.num_workers),
        ("prefetch factor", facts.prefetch_factor),
        ("pinned memory", facts.pin_memory),
        ("persistent workers", facts.persistent_workers),
        ("decoder", facts.decoder),
        ("backend", facts.backend),
        ("lightning_feed", where.lightning_feed),
        ("Lightning", facts.lightning or where.lightning or where.pytorch_lightning),
        ("torch", where.torch),
        ("Python", where.python),
        ("platform", where.platform),
    )
    words = {True: "yes", False: "no"}
    return [
        (name, words[value] if isinstance(value, bool) else str(value)) for name, value in rows if value is not None
    ]


def _batch(samples: int | None, megabytes: float | None) -> str | None:
    known = ("" if samples is None else f"{samples} samples", "" if megabytes is None else f"{megabytes:.2f} MB")
    return ", ".join(one for one in known if one) or None


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(words: str) -> str:
    """Text that stays text in Markdown, also in the cell of a table."""
    flat = printable(re.sub(r"\s+", " ", words)).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)


def _code(words: str) -> str:
    """Code that stays one line of code in the cell of a table."""
    flat = printable(re.sub(r"\s+", " ", words)).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    return f"{fence} {flat} {fence}" if len(fence) > 1 else f"`{flat}`"
