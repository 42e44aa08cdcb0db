"""Tables that the documentation build makes of the code: the tags that loggers get, and the options of the commands."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields

import report_tables

from lightning_feed import cli
from lightning_feed.measure.stats import GpuStats, LoaderStats, RankStats, StarvationStats, tag_table


def tags() -> str:
    """Every tag of ``tags="all"`` with its meaning, from the docstrings of the figures."""
    kinds = (StarvationStats, RankStats, LoaderStats, GpuStats)
    meanings = {
        one.metadata["tag"]: report_tables.meaning(kind, one.name).replace("null", "absent")
        for kind in kinds
        for one in fields(kind)
        if one.metadata
    }
    rows = "\n".join(f"| `{tag}` | {meanings[tag]} |" for tag in tag_table())
    return f"| tag | meaning |\n|---|---|\n{rows}\n"


def commands() -> str:
    """A section for each command: its description and its options, from the parser."""
    (choices,) = (one.choices for one in cli.make_parser()._actions if isinstance(one, argparse._SubParsersAction))
    return "\n".join(_section(name, parser) for name, parser in choices.items())


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    usage = parser.format_usage().removeprefix("usage: ").strip()
    rows = "\n".join(f"| `{option}` | {meaning} |" for option, meaning in _options(parser))
    words = _text(parser.description or "")
    return f"## `{name}`\n\n{words}\n\n```text\n{usage}\n```\n\n| option | meaning |\n|---|---|\n{rows}\n"


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for one in parser._actions:
        name = " ".join(filter(None, (one.option_strings[-1] if one.option_strings else "", _value(one))))
        if name != "--help":
            yield name, _text(one.help or "").replace("|", "\\|")


def _text(words: str) -> str:
    """Words of the command line in Markdown."""
    return re.sub(r"(?<!\S)--[a-z-]+", r"`\g<0>`", words).replace("<", "\\<")


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices:
        return " or ".join(map(str, action.choices))
    return str(action.metavar or "")
