"""The pages name every key and every option."""

import argparse
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from lightning_feed import cli
from lightning_feed.watch.reports.document import Parts
from lightning_feed.watch.verdict.diagnosis import SYNCS, Bottleneck, Cause, Diagnosis, Grade

DOCS = Path(__file__).parents[3] / "docs"


def _tables(page: str) -> dict[str, list[str]]:
    """Heading -> the code names in the first column of the tables below it."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in (DOCS / page).read_text().splitlines():
        if title := re.match(r"#+ (.*)", line):
            heading = title[1].replace("`", "")
            found[heading] = []
        elif row := re.match(r"\| `([^`]+)` \|", line):
            found[heading].append(row[1])
    return found


def _keys(kind: Any, name: str, seen: set[Any]) -> dict[str, list[str]]:
    """Every object in the report -> its keys; of a kind that comes twice only where it is first."""
    if kind in seen:
        return {}
    seen.add(kind)
    hints = get_type_hints(kind)
    found = {name: [one.name for one in fields(kind)]}
    for one in fields(kind):
        hint = hints[one.name]
        dotted = one.name if not name else f"{name}.{one.name}"
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner):
                found |= _keys(inner, f"{dotted}[]" if get_origin(hint) is tuple else dotted, seen)
    return found


def test_every_key_of_the_report_is_documented() -> None:
    documented = _tables("reference/report.md")
    keys = _keys(Parts, "", set())
    assert documented["The file"] == ["schema", "written_at", *keys.pop("")]
    for name, names in keys.items():
        assert documented.get(name) == names, f"docs/reference/report.md, ## `{name}`: a row for each field, in order"


def test_every_word_of_a_verdict_is_documented() -> None:
    text = (DOCS / "reference/report.md").read_text()
    for word in (*get_args(Bottleneck), *get_args(Grade), *get_args(Cause), *SYNCS):
        assert f"`{word}`" in text, word
    assert get_type_hints(Diagnosis)["cause"] == Cause


@pytest.mark.parametrize("command", ["report RUN", "compare A B"])
def test_every_option_is_documented(command: str) -> None:
    name = command.split()[0]
    (commands,) = (one for one in cli._parser()._actions if isinstance(one, argparse._SubParsersAction))
    parser = commands.choices[name]
    options = [one.option_strings[-1] for one in parser._actions if one.option_strings and one.dest != "help"]
    rows = _tables("reference/command-line.md")[f"lightning-feed {command}"]
    assert [row.split()[0] for row in rows] == options


@pytest.mark.parametrize("page", ["reference/report.md", "how-to/ci-gate.md"])
def test_commands_on_the_pages_parse(page: str) -> None:
    commands = re.findall(r"lightning-feed ((?:report|compare)\b[^`\n]*)", (DOCS / page).read_text())
    assert len(commands) >= 2
    for command in commands:
        cli._parser().parse_args(command.split())
