"""Programs as users write them, run as users run them: does the report say what is wrong, and does it help?

A part of gpu_day.py. Each program is gpu_program.py with other arguments, in a process of its own, with
``LIGHTNING_FEED=1`` or ``tune``, or under ``lightning-feed diagnose``. Step times are those of the program's own clock.
Without a CUDA device the sizes are small, and no verdict is expected where it depends on the device:

    python benchmarks/gpu_programs.py programs --out FILE
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_claims import Claim, Report, at_most, run_part
from pictures import make_picture

from lightning_feed.machine.limits import read_machine
from lightning_feed.report.document import read_document
from lightning_feed.report.next_step import next_step
from lightning_feed.report.words import words

PROGRAM = Path(__file__).with_name("gpu_program.py")
ON_DEVICE = torch.cuda.is_available()
BATCH = 64 if ON_DEVICE else 4
SIZE = 224 if ON_DEVICE else 64
STEPS = 64 if ON_DEVICE else 32
PHOTOS = STEPS * BATCH
"""An epoch of them has all steps of a run."""
DIFFERENT_PHOTOS = 64
CPUS = read_machine().usable_cpus
LIMIT_S = 90.0
"""Of one program."""
HUGE_BATCH = 25 if ON_DEVICE else 4
"""Samples of 4 MB."""
NO_WORKERS = "jpegs, no workers"
GOOD = "jpegs, good settings"
TUNED = "jpegs, tuned"
HUGE = "huge batches"
HUGE_TUNED = "huge batches, tuned"
ALIKE = 1.1
"""Factor within which two runs of the same settings are equally fast."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the program, and the verdict that is right for it."""

    name: str
    arguments: tuple[str, ...]
    feed: str = "1"
    """Value of LIGHTNING_FEED."""
    expected: tuple[str, ...] = ()
    """Verdicts that are right: ``bottleneck/cause`` or ``bottleneck``. Empty: any is."""
    needs_device: bool = False
    """The expected verdict is one of a CUDA device only."""
    next_step: str = ""
    """Words of the advice that is right; empty: any is."""
    evidence: str = ""
    """Words of the evidence that is right; empty: any is."""


def runs(photos: Path) -> list[Run]:
    """All runs of the program."""
    jpegs = ("jpegs", "--data", str(photos), "--batch", str(BATCH), "--size", str(SIZE))
    one_epoch = ("--steps", str(STEPS))
    three_epochs = ("--steps", str(3 * STEPS))
    huge = ("huge", "--batch", str(HUGE_BATCH), "--workers", str(min(8, CPUS)), "--pageable")
    launches = ("launches", "--batch", "32", "--steps", "200", "--workers", "2")
    reads = ("reads", "--batch", str(2 * BATCH), "--steps", str(2 * STEPS), "--workers", str(min(8, CPUS)))
    folder = ("folder", "--data", str(photos), "--batch", str(4 * BATCH), "--size", str(SIZE))
    return [
        Run(name=NO_WORKERS, arguments=(*jpegs, *one_epoch), expected=("data/no workers",)),
        Run(name=GOOD, arguments=(*jpegs, *one_epoch, "--workers", str(CPUS))),
        Run(name=TUNED, arguments=(*jpegs, *three_epochs), feed="tune"),  # what is found holds from the next epoch on
        Run(
            name=HUGE,
            arguments=(*huge, "--steps", str(2 * STEPS)),
            expected=("data", "copy"),
            needs_device=True,
            next_step="paste the first fix",  # the run is too short for trials
        ),
        Run(name=HUGE_TUNED, arguments=(*huge, "--steps", str(32 * STEPS if ON_DEVICE else 6 * STEPS)), feed="tune"),
        Run(name="tiny kernels", arguments=launches, expected=("compute/launch",), needs_device=True),
        Run(
            name="the loss is read",
            arguments=reads,
            expected=("compute/compute",),
            needs_device=True,
            evidence="waits for the GPU in each step (`self.last_loss = loss.item()`), which costs nothing",
        ),
        Run(
            name="our folder",
            arguments=(*folder, "--steps", str(STEPS)),
            expected=("data/cpu", "data/oversubscribed"),
            needs_device=True,
            next_step="diagnose",
        ),
    ]


def programs(report: Report, _: float) -> None:
    """Run all programs, hold their verdicts against what is right, and compare their steps."""
    with tempfile.TemporaryDirectory() as scratch:
        photos = make_photos(Path(scratch) / "photos")
        steps_ms: dict[str, float] = {}
        for run in runs(photos):
            folder = Path(scratch) / "reports" / run.name
            try:
                steps_ms[run.name] = train(run, folder)
            except subprocess.SubprocessError as error:
                report.add(Claim(claim=f"verdict, {run.name}", passed=False, detail=str(error)))
                continue
            reported = json.loads((folder / "feed_report.json").read_text())
            report.add(verdict_claim(run, reported), *advice_claims(run, folder))
            add_row(report, run.name, reported, steps_ms[run.name])
        for name, other in ((GOOD, NO_WORKERS), (TUNED, NO_WORKERS), (TUNED, GOOD), (HUGE_TUNED, HUGE)):
            ratio = steps_ms.get(name, math.nan) / steps_ms.get(other, math.nan)
            report.add(at_most(f"step, {name}, over that of {other}", ratio, ALIKE))
        diagnose(report, photos, Path(scratch) / "diagnosis")


def make_photos(folder: Path) -> Path:
    """Two class folders of JPEGs, of which some are alike."""
    photos = [make_picture(seed) for seed in range(min(PHOTOS, DIFFERENT_PHOTOS))]
    for number in range(PHOTOS):
        file = folder / f"class_{number % 2}" / f"{number:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(photos[number % len(photos)])
    return folder


def own_environment(cache: Path) -> dict[str, str]:
    """The environment of a program that remembers nothing of earlier runs."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    if not ON_DEVICE:
        environment["OMP_NUM_THREADS"] = "1"  # training would else take the CPUs of the workers
    return environment


def train(run: Run, folder: Path) -> float:
    """Run the program to its end. Its report lies in ``folder``. Returns the milliseconds of a step."""
    environment = {**own_environment(folder), "LIGHTNING_FEED": run.feed, "LIGHTNING_FEED_DIR": str(folder)}
    print(f"--- {run.name}", flush=True)
    command = [sys.executable, str(PROGRAM), *run.arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    print(done.stdout, flush=True)
    timed = done.stdout.strip().rpartition("\n")[2]
    return float(timed.removesuffix(" ms a step"))


def diagnose(report: Report, photos: Path, folder: Path) -> None:
    """``lightning-feed diagnose`` of the program without workers: it names them, and advises some."""
    run = next(run for run in runs(photos) if run.name == NO_WORKERS)
    options = ["--quick", "--json", "--out", str(folder)]
    command = [sys.executable, "-m", "lightning_feed", "diagnose", *options, str(PROGRAM), "--", *run.arguments]
    environment = own_environment(folder)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=2 * LIMIT_S)
    if done.returncode:
        detail = f"it ended with exit code {done.returncode}"
        report.add(Claim(claim="lightning-feed diagnose", passed=False, detail=detail))
        return
    reported = json.loads(done.stdout)
    report.add(verdict_claim(run, reported, how=", by lightning-feed diagnose"))
    add_row(report, f"{run.name}, diagnosed", reported, reported["step"]["step_ms"])
    advised = [remedy["code"] for remedy in reported["remedies"] if "num_workers" in (remedy["code"] or "")]
    claim = "lightning-feed diagnose advises workers"
    report.add(Claim(claim=claim, measured=advised[0] if advised else "none", passed=bool(advised)))


def verdict_claim(run: Run, reported: dict[str, Any], how: str = "") -> Claim:
    """The verdict of a report, and whether it is right."""
    verdict = reported["verdict"]
    named = f"{verdict['bottleneck']}/{verdict['cause']}"
    passed = None
    if run.expected and (ON_DEVICE or not run.needs_device):
        passed = named in run.expected or verdict["bottleneck"] in run.expected
    goal = " or ".join(run.expected)
    return Claim(claim=f"verdict, {run.name}{how}", measured=named, goal=goal, passed=passed)


def advice_claims(run: Run, folder: Path) -> list[Claim]:
    """What the report advises next, and what it rests on, where a run says what is right."""
    read = read_document(folder)
    claims = []
    if run.next_step:
        advised = next_step(read.diagnosis, read.run)
        passed = run.next_step in advised if ON_DEVICE else None
        claims.append(Claim(claim=f"next, {run.name}", measured=advised, goal=run.next_step, passed=passed))
    if run.evidence:
        evidence = "; ".join(words(note, read.diagnosis.measurements) for note in read.diagnosis.evidence)
        passed = run.evidence in evidence if ON_DEVICE else None
        claims.append(Claim(claim=f"evidence, {run.name}", measured=evidence, goal=run.evidence, passed=passed))
    return claims


def add_row(report: Report, name: str, reported: dict[str, Any], step_ms: float) -> None:
    """A row of the table."""
    report.row(
        program=name,
        workers=reported["run"]["loader"]["num_workers"],
        step_ms=step_ms,
        starved_pct=reported["step"]["starved_pct"],
        verdict=f"{reported['verdict']['bottleneck']}: {reported['verdict']['cause']}",
    )


if __name__ == "__main__":
    run_part({"programs": programs}, needs_device=False)
