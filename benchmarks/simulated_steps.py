"""The length of a training step on a simulated device, against theory: with PrefetchCallback and without.

The device of the tests (tests/simulated) has streams, a copy engine and a clock, but no hardware: a real Trainer runs
on it, with the real callbacks. Every combination of short, middle and long computing, copying and loading is trained in
each of eight arrangements: pinned or pageable batches, a host that runs ahead or waits in each step, worker processes
or none. For each arrangement it prints the range of the step over its longest part, how far any step was from the
theory of tests/simulated/grid.py, and how far ``starved_pct`` was from the simulated truth.

    python benchmarks/simulated_steps.py
"""

import logging
import sys
import warnings
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulated.grid import Case, Found, run

DURATIONS_MS = (2.0, 5.0, 11.0)
DEPTHS = (None, 1, 2)


def row(pinned: bool, synchronises: bool, in_main_process: bool) -> str:  # noqa: FBT001
    """One arrangement over all durations, as a line of the table."""
    ratios: dict[int | None, list[float]] = {depth: [] for depth in DEPTHS}
    off_theory, off_truth = 0.0, 0.0
    for compute, copy, load in product(DURATIONS_MS, repeat=3):
        case = Case(compute, copy, load, pinned, synchronises, in_main_process)
        for depth in DEPTHS:
            found: Found = run(case, depth)
            assert not found.races, found.races
            theory = case.plain_ms() if depth is None else case.prefetched_ms(depth)
            ratios[depth].append(found.step_ms / max(compute, copy, load))
            off_theory = max(off_theory, abs(found.step_ms / theory - 1))
            off_truth = max(off_truth, abs(found.starved_pct - found.truly_starved_pct))
    names = (
        "page-locked" if pinned else "pageable",
        "waits in each step" if synchronises else "runs ahead",
        "in the main process" if in_main_process else "workers",
    )
    ranges = [f"{min(each):.2f} to {max(each):.2f}" for each in ratios.values()]
    return f"| {' | '.join([*names, *ranges, f'{100 * off_theory:.2f} %', f'{off_truth:.2f}'])} |"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| batches | host | loading | plain | depth 1 | depth 2 | off theory | `starved_pct` off |")
    print("|---|---|---|---|---|---|---:|---:|")
    for in_main_process, synchronises, pinned in product((False, True), (False, True), (True, False)):
        print(row(pinned, synchronises, in_main_process), flush=True)


if __name__ == "__main__":
    main()
