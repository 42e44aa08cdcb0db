"""The demo on an idle machine, and with a program that keeps one CPU busy: seconds per epoch of its three runs.

    python benchmarks/demo.py --rounds 3

Runs ``lightning-feed demo`` idle and busy in turn, so that a machine that gets slower does so for both, and prints the
median [least, most] of the rounds, and the most memory that the demo took: anonymous and shared memory of all of its
processes, each page counted once, looked at twice a second. The images are made beforehand. Takes about two minutes a
round on two CPUs.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from loader_process import memory_of

from lightning_feed.demo import IMAGES, RUNS
from lightning_feed.demo_images import make_images
from lightning_feed.machine.limits import read_machine


@contextmanager
def busy_cpu(*, wanted: bool) -> Iterator[None]:
    """Another program that computes all the time, with the same priority."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if program is not None:
            program.kill()
            program.wait()


def run_demo(out: Path) -> dict[str, Any]:
    """The figures of one demo, with ``wall_s`` and ``memory_mb``."""
    began, most = time.perf_counter(), 0.0
    command = [sys.executable, "-m", "lightning_feed", "demo", "--out", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        while process.poll() is None:  # the figures are few: they fit into the pipe
            most = max(most, memory_of(process.pid))
            time.sleep(0.5)
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    return {**json.loads(printed), "wall_s": time.perf_counter() - began, "memory_mb": most}


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def table(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """One row for the idle machine, one for the busy one."""
    lines = [
        "| one CPU is | plain, s | fed, s | advised, s | plain : fed | plain : advised | demo, s | memory, MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in rounds.items():
        epochs_s = [spread([one[run]["epoch_s"] for one in found]) for run in RUNS]
        ratios = [spread([one["plain"]["epoch_s"] / one[run]["epoch_s"] for one in found]) for run in RUNS[1:]]
        wall_s = f"{statistics.median(one['wall_s'] for one in found):.0f}"
        most = f"{max(one['memory_mb'] for one in found):.0f}"
        lines.append(f"| {' | '.join([name, *epochs_s, *ratios, wall_s, most])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {"idle": [], "busy": []}
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), IMAGES)
        for _ in range(options.rounds):
            for name, found in rounds.items():
                with busy_cpu(wanted=name == "busy"):
                    found.append(run_demo(Path(folder)))
                seconds = ", ".join(f"{run} {found[-1][run]['epoch_s']:.2f} s" for run in RUNS)
                print(f"{name}: {seconds}", flush=True)
    where = f"{read_machine().usable_cpus} CPUs, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"\n{where}, load {os.getloadavg()[0]:.1f} at the end, decoder {rounds['idle'][0]['decoder']!r}\n")
    print(table(rounds))
