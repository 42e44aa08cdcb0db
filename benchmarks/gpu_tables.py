"""The GPU tables of docs/benchmarks.md, from the results of gpu_day.py.

Each table stands between ``<!-- gpu_day:NAME -->`` and ``<!-- /gpu_day -->``, and is written anew; a second run changes
nothing. What has not been measured says so.

    python benchmarks/gpu_tables.py [--results gpu_day.json] [--page docs/benchmarks.md]
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_claims import Claim, number_text
from gpu_day import PARTS, read_results

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
NOT_MEASURED = "Not measured yet."
BLOCK = re.compile(r"<!-- gpu_day:(\S+) -->\n(.*?)<!-- /gpu_day -->\n", re.DOTALL)
Columns = dict[str, str]
"""Field of a row -> heading of its column."""
TABLES: dict[str, Columns] = {
    "share": {
        "data_ms": "data, ms",
        "compute_ms": "compute, ms",
        "prefetched": "prefetched",
        "step_ms": "step, ms",
        "told_pct": "starved, %",
        "trace_pct": "in the trace, %",
    },
    "overlap-trace": {
        "run": "",
        "copy_ms": "copy, ms",
        "gb_per_s": "GB/s",
        "under_compute_pct": "under compute, %",
        "step_ms": "step, ms",
    },
    "memory": {"run": "", "peak_mb": "peak, MB", "batches_beyond_plain": "batches beyond plain"},
    "nvjpeg": {"batch": "batch", "mean_file_kb": "mean file, kB", "images_per_s": "images/s"},
    "overhead": {"callbacks": "", "us": "us a step", "spread": "least, most"},
    "overlap": {
        "model": "model",
        "batch": "batch",
        "compute_ms": "compute, ms",
        "loader_ms": "loader, ms",
        "copy_ms": "copy, ms",
        "plain_ms": "plain, ms",
        "ours_ms": "ours, ms",
        "plain_ratio": "plain / slowest",
        "ours_ratio": "ours / slowest",
    },
}
"""Of the parts that have rows."""


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu_day.json"), help="no such file: nothing was measured")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    options.page.write_text(fill(options.page.read_text(), read_results(options.results)))


def fill(page: str, results: dict[str, Any]) -> str:
    """The page with every table written anew.

    Raises:
        SystemExit: when a marker is missing, unknown, or stands twice.
    """
    makers: dict[str, Callable[[], str]] = {"claims": lambda: claims_table(results)}
    makers |= {name: lambda name=name: part_table(name, results.get(name)) for name in TABLES}
    found = BLOCK.findall(page)
    names = [name for name, _ in found]
    opened, closed = page.count("<!-- gpu_day:"), page.count("<!-- /gpu_day -->")
    if (
        sorted(names) != sorted(makers)
        or not len(found) == opened == closed
        or any("<!--" in text for _, text in found)
    ):
        raise SystemExit(
            f"The markers of the page do not fit. Wanted, each once, with <!-- /gpu_day --> on a line behind it: "
            f"{', '.join(makers)}. Found: {', '.join(names)}; {opened} opened, {closed} closed."
        )
    return BLOCK.sub(lambda block: f"<!-- gpu_day:{block[1]} -->\n{makers[block[1]]()}\n<!-- /gpu_day -->\n", page)


def claims_table(results: dict[str, Any]) -> str:
    """What was measured on which machine, and all claims."""
    measured = {part.name: results[part.name] for part in PARTS if _is_measured(results.get(part.name))}
    if not measured:
        return NOT_MEASURED
    lines = list(dict.fromkeys(f"- {_machine(result)}" for result in measured.values()))
    lines += ["", "| part | claim | measured | goal | met |", "|---|---|---:|---|---|"]
    for name, result in measured.items():
        for claim in (Claim(**fields) for fields in result["claims"]):
            told = "not measured" if claim.measured is None else f"{number_text(claim.measured)} {claim.unit}".rstrip()
            met = {True: "yes", False: "**no**", None: ""}[claim.passed]
            lines.append(f"| {name} | {_cell(claim.claim)} | {_cell(told)} | {_cell(claim.goal)} | {met} |")
    return "\n".join(lines)


def part_table(name: str, result: dict[str, Any] | None) -> str:
    """The rows of a part."""
    if result is None or not result["rows"]:
        return NOT_MEASURED
    columns = TABLES[name]
    right = [all(not isinstance(row.get(field), str) for row in result["rows"]) for field in columns]
    lines = [
        f"| {' | '.join(columns.values())} |",
        f"|{'|'.join('---:' if number else '---' for number in right)}|",
        *(f"| {' | '.join(_cell(row.get(field)) for field in columns)} |" for row in result["rows"]),
    ]
    return "\n".join(lines)


def _is_measured(result: dict[str, Any] | None) -> bool:
    return result is not None and any(
        claim["measured"] is not None or claim["passed"] is not None for claim in result["claims"]
    )


def _machine(result: dict[str, Any]) -> str:
    of = result["machine"]
    return (
        f"{of['device']}, driver {of['driver']}, CUDA {of['cuda']}; {of['cpus']} CPUs ({of['cpu']}); Python "
        f"{of['python']}, torch {of['torch']}, torchvision {of['torchvision']}, Lightning {of['lightning']}; "
        f"{result['date'][:10]}"
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else number_text(value).replace("|", "\\|")


if __name__ == "__main__":
    main()
