"""Training from JPEGs with each image backend, on a machine with an NVIDIA GPU: images/s, memory, largest batch.

torchvision's models in bf16 (autocast), trained by a Lightning Trainer through ImageFolderDataModule with
GPUStarvationCallback, and PrefetchCallback where the backend leaves it work to do. Each cell (model x backend) runs in
a process of its own, for ``--budget`` seconds; the backends take turns, in an order that rotates from round to round.
Figures are medians over the rounds with [least, most]; x is the median of the ratios to "torch" in the same round.

* ``step``       mean of some steps, between two moments at which the device was waited for
* ``compute``    a step of the same model on a batch that lies on the device
* ``feed``       the time from one batch that is ready on the device to the next, with nothing else to do; from the
  loader of a fit, whose batches are pinned where they go to a GPU
* ``efficiency`` max(compute, feed) / step: 1.00 where all but the slower of the two is hidden. A backend that decodes
  on the GPU takes it from the model, so that it cannot reach 1.00 where both are about as slow.
* ``starved``    share of the step that the GPU waited for data, as GPUStarvationCallback has it
* ``torch MB``   ``torch.cuda.max_memory_allocated``; ``device MB``: what NVML says the run took besides CUDA's context
* ``*``          the budget ended before the loader's queue and 20 steps more were used up: give it more

``--largest`` searches the largest batch size that trains for some steps instead: doubled until the device is out of
memory, then halved in, each attempt in a process of its own. ``--device-gb 16`` lets the GPU have no more than that.
Pictures are made (500 x 375, 110 kB) unless ``--data`` names some. A backend that cannot run says why. Where one
command may not last long: ``--models`` and ``--json`` for parts, then ``--show`` for one table of all of them.

    python benchmarks/backends.py [--models resnet18,resnet50] [--backends torch,nvjpeg] [--rounds 3] [--budget 40]
    python benchmarks/backends.py --largest --models resnet18 [--device-gb 16] [--budget 240]
    python benchmarks/backends.py --show FIRST.json SECOND.json
    python benchmarks/backends.py --device cpu --quick      (a trial of this script, for machines without a GPU)
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from backend_machine import machine_line, why_missing
from backends_cell import Job
from backends_pictures import find_or_make, lay_out
from backends_table import BACKENDS, show
from largest_batch import Found, largest_batch

MODELS = ("shufflenet_v2_x0_5", "resnet18", "resnet50")
START_S = 150.0
"""Allowed to a process besides its budget: imports, loaders, one step that is slow."""
QUICK: dict[str, Any] = {"models": MODELS[0], "rounds": 1, "budget": 10.0, "steps": 3, "pictures": 32}
QUICK_ON_CPU: dict[str, Any] = {"batch": 16, "size": 64, "most": 32}


def main() -> None:
    """Run the cells that were asked for, and print the table."""
    arguments = _arguments()
    if arguments.show:
        parts = [json.loads(path.read_text()) for path in arguments.show]
        show(dict.fromkeys(part["machine"] for part in parts), [cell for part in parts for cell in part["cells"]])
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device. A trial of the script: --device cpu --quick")
    machine = machine_line()
    if arguments.device == "cpu":
        machine = f"A TRIAL OF THE SCRIPT ON THE CPU: these figures say nothing of a GPU. {machine}"
    machine += f"; batch {arguments.batch}, {arguments.size} x {arguments.size} px, {arguments.budget:.0f} s a cell"
    print(machine, flush=True)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "pictures"
        source.mkdir()
        files = find_or_make(arguments.data, source, arguments.pictures)
        wanted = 3 * arguments.most if arguments.largest else 64 * arguments.batch
        folder = lay_out(files, Path(scratch) / "data", max(wanted, len(files)))
        for cell in _cells(arguments, folder):
            cells.append(cell)
            print(f"  {_line(cell)}", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps({"machine": machine, "cells": cells}, indent=1))
    show([machine], cells)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="with commas between")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--batch", type=int, default=512, help="batch size; of --largest, the first to try")
    parser.add_argument("--size", type=int, default=224, help="side of the images that are trained on, pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each cell, start-up not counted")
    parser.add_argument("--steps", type=int, default=100, help="to measure, where the budget allows")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which no cell begins")
    parser.add_argument("--workers", type=int, help="of each loader; default: as recommended")
    parser.add_argument("--torch-workers", choices=("process", "thread"), default="process")
    parser.add_argument("--largest", action="store_true", help="search the largest batch size instead")
    parser.add_argument("--most", type=int, default=16384, help="largest batch size to try")
    parser.add_argument("--device-gb", type=float, help="GB of the GPU's memory to use")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with JPEGs at any depth")
    parser.add_argument("--pictures", type=int, default=2048, help="how many to make, without --data")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one model, one round, few steps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the table of earlier runs")
    given, _ = parser.parse_known_args()
    if given.quick:
        parser.set_defaults(**QUICK, **(QUICK_ON_CPU if given.device == "cpu" else {}))
    return parser.parse_args()


def _cells(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The figures of one cell after the other."""
    models, backends = arguments.models.split(","), arguments.backends.split(",")
    if unknown := [name for name in backends if name not in BACKENDS]:
        raise SystemExit(f"--backends {','.join(unknown)}: give some of {','.join(BACKENDS)}")
    left_out = {name: reason for name in backends if (reason := _why_not(name, arguments.device))}
    for model in models:
        for name, reason in left_out.items():
            yield {"model": model, "backend": name, "skipped": reason}
    can = [name for name in backends if name not in left_out]
    ends = time.monotonic() + arguments.stop_after
    for number in range(1 if arguments.largest else arguments.rounds):
        for model in models:
            for backend in can[number % len(can) :] + can[: number % len(can)] if can else []:
                if time.monotonic() > ends:
                    return
                job = _job(arguments, folder, model, backend)
                figures = _search(job, arguments.most) if arguments.largest else _run(job)
                yield {"model": model, "backend": backend, "round": number, **figures}


def _job(arguments: argparse.Namespace, folder: Path, model: str, backend: str) -> Job:
    return Job(
        what="attempt" if arguments.largest else "rate",
        model=model,
        backend=backend,
        folder=str(folder),
        batch_size=arguments.batch,
        image_size=arguments.size,
        device=arguments.device,
        budget_s=arguments.budget,
        steps=arguments.steps,
        workers=arguments.workers or "auto",
        torch_workers=arguments.torch_workers,
        device_gb=arguments.device_gb,
    )


def _why_not(backend: str, device: str) -> str:
    """Why a backend cannot run here; "" where it can."""
    if backend in ("nvjpeg", "dali-gpu") and device == "cpu":
        return "no GPU"
    return why_missing(backend, torch.device(device, 0))


def _run(job: Job) -> dict[str, Any]:
    """The figures of a cell, from its own process; ``failed`` with the last that it said, where there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch) / "out", Path(scratch) / "log"
        command = [sys.executable, str(Path(__file__).with_name("backends_cell.py")), json.dumps(asdict(job)), str(out)]
        with log.open("w") as said:
            try:
                code = subprocess.run(command, stdout=said, stderr=said, timeout=2 * job.budget_s + START_S).returncode
                ended = f"exit code {code}"
            except subprocess.TimeoutExpired as error:
                ended = f"not done after {error.timeout:.0f} s"
        if out.exists():  # also of a process that then did not end
            return dict(json.loads(out.read_text()))
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"failed": f"{ended}: {lines[-1] if lines else 'nothing said'}"[:300]}


def _search(job: Job, most: int) -> dict[str, Any]:
    ends = time.monotonic() + job.budget_s
    attempts: list[dict[str, Any]] = []

    def fits(batch_size: int) -> bool:
        figures = _run(Job(**{**asdict(job), "batch_size": batch_size}))
        attempts.append({"batch_size": batch_size, **figures})
        if "failed" in figures:
            raise RuntimeError(figures["failed"])
        return bool(figures["fits"])

    try:
        found = largest_batch(fits, first=job.batch_size, most=most, expired=lambda: time.monotonic() > ends)
    except RuntimeError as error:
        return {"failed": f"batch size {attempts[-1]['batch_size']}: {error}", "attempts": attempts}
    return {"largest": Found._asdict(found), "attempts": attempts}


def _line(cell: dict[str, Any]) -> str:
    found = {key: value for key, value in cell.items() if key not in ("model", "backend", "round", "attempts")}
    told = (f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items())
    return f"{cell['model']} {cell['backend']}: {', '.join(told)}"


if __name__ == "__main__":
    main()
