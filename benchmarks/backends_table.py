"""The tables of `backends.py`, from the figures of its cells."""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, TypeAlias

BACKENDS = ("torch", "nvjpeg", "dali-cpu", "dali-gpu")
"""In the order of the rows."""
Cell: TypeAlias = dict[str, Any]


def show(machines: Iterable[str], cells: list[Cell]) -> None:
    """Print what was measured, one row for each model and backend; and the largest batch sizes, where searched."""
    print("\n" + "\n".join(machines))
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    cells = sorted(cells, key=lambda cell: (models.index(cell["model"]), BACKENDS.index(cell["backend"])))
    rates = [cell for cell in cells if "largest" not in cell and "attempts" not in cell]
    searched = [cell for cell in cells if cell not in rates]
    if any("step_ms" in cell for cell in rates):
        _rates(rates)
    if searched:
        print("\n| model | backend | largest batch size | torch MB there |\n|---|---|---:|---:|")
        for cell in searched + [cell for cell in rates if "skipped" in cell and cell not in searched]:
            print(f"| {cell['model']} | {cell['backend']} | {_largest(cell)} |")
    for cell in rates:
        if "failed" in cell:
            print(f"{cell['model']} {cell['backend']}, round {cell['round']} failed: {cell['failed']}")


def _rates(cells: list[Cell]) -> None:
    print(
        "\n| model | backend | images/s | x | step, ms | compute, ms | feed, ms | efficiency | starved, % | torch MB | "
        "device MB |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for model, backend in dict.fromkeys((cell["model"], cell["backend"]) for cell in cells):
        mine = [cell for cell in cells if (cell["model"], cell["backend"]) == (model, backend)]
        runs = [cell for cell in mine if "step_ms" in cell]
        if not runs:
            reason = mine[0].get("skipped") or mine[0].get("failed")
            print(f"| {model} | {backend} | not run: {reason} |" + " |" * 8)
            continue
        base = {cell["round"]: cell for cell in cells if (cell["model"], cell["backend"]) == (model, "torch")}
        ratios = [
            cell["images_per_s"] / base[cell["round"]]["images_per_s"]
            for cell in runs
            if "images_per_s" in base.get(cell["round"], {})
        ]
        star = "" if all(cell["settled"] for cell in runs) else " *"
        cells_of_row = [
            _spread(runs, lambda cell: cell["images_per_s"], 0) + star,
            f"{median(ratios):.2f}" if ratios else "",
            *(_spread(runs, lambda cell, key=key: cell[key], 1) for key in ("step_ms", "compute_ms", "feed_ms")),
            _spread(runs, lambda cell: max(cell["compute_ms"], cell["feed_ms"]) / cell["step_ms"], 2),
            _spread(runs, lambda cell: cell["starved_pct"], 1),
            *(_spread(runs, lambda cell, key=key: cell[key], 0) for key in ("allocated_mb", "device_mb")),
        ]
        print(f"| {model} | {backend} | " + " | ".join(cells_of_row) + " |")


def _spread(runs: list[Cell], figure: Callable[[Cell], float | None], digits: int) -> str:
    """Median [least, most]; empty where it was not measured."""
    values = [value for cell in runs if (value := figure(cell)) is not None]
    if not values:
        return ""
    told = f"{median(values):.{digits}f}"
    return told if len(values) == 1 else f"{told} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def _largest(cell: Cell) -> str:
    if "largest" not in cell:
        return f"not run: {cell.get('skipped') or cell.get('failed')} | "
    fits, fails = cell["largest"]["fits"], cell["largest"]["fails"]
    there = next((one.get("allocated_mb") for one in cell["attempts"] if one["batch_size"] == fits), None)
    size = "none" if fits is None else f"{fits}" if fails is not None else f"{fits} or more"
    return f"{size}{f' (not {fails})' if fails is not None else ''} | {'' if there is None else f'{there:.0f}'}"
