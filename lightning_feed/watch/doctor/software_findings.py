"""Threads, decoders and versions."""

import re
import sys
from collections.abc import Iterator

from lightning_feed.load.machine import read_machine
from lightning_feed.watch.doctor.finding import NOT_KNOWN, Finding
from lightning_feed.watch.doctor.sources import Sources

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
PACKAGES = ("torch", "torchvision", "lightning", "pytorch_lightning")


def threads(sources: Sources) -> Iterator[Finding]:
    """Thread-count variables, and torch's threads, beside the usable CPUs."""
    usable = read_machine(sources.root).usable_cpus
    given = {name: sources.environ[name] for name in THREAD_VARIABLES if sources.environ.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    threads_by_name = {name: _thread_count(name, value) for name, value in given.items()}
    invalid = [f"{name}={given[name]}" for name, count in threads_by_name.items() if count is None]
    counts = [count for count in threads_by_name.values() if count is not None]
    if invalid:
        yield Finding(
            topic="thread variables",
            value=shown,
            level="warning",
            meaning=f"{', '.join(invalid)}: no number of threads, so it is ignored, or stops what reads it",
            do=f"Set a whole number from 1 to {usable}, or leave it out.",
        )
    if counts and max(counts) > usable:
        yield Finding(
            topic="thread variables",
            value=shown,
            level="warning",
            meaning=f"more threads than the {usable} usable CPUs: they take turns and slow each other",
            do=f"Set them to {usable} or less, or leave them out.",
        )
    elif invalid:
        pass
    elif 1 in counts and usable > 1:
        yield Finding(
            topic="thread variables",
            value=shown,
            level="note",
            meaning="right for workers; in the main process CPU operations use one thread (torchrun sets it so)",
            do="Leave it out where the model trains on the CPU.",
        )
    else:
        yield Finding(topic="thread variables", value=shown or "none set")
    try:
        count = int(sources.load("torch").get_num_threads())
    except ImportError as error:
        yield Finding(topic="torch threads", value=NOT_KNOWN, level="note", meaning=str(error))
        return
    many = count > usable
    yield Finding(
        topic="torch threads",
        value=str(count),
        level="warning" if many else "ok",
        meaning=f"more than the {usable} usable CPUs: torch sees the machine, not the quota" if many else "",
        do=f"OMP_NUM_THREADS={usable}, or torch.set_num_threads({usable})." if many else "",
    )


def _thread_count(name: str, value: str) -> int | None:
    """Threads that a variable asks for; None where that is no number of them.

    OpenMP's may be a list, a number for each level of nesting, of which the first counts here. What libgomp takes for a
    number was tried with torch 2.15: spaces and a plus sign, no 0, no hexadecimal one.
    """
    parts = [part.strip().removeprefix("+") for part in (value.split(",") if name == "OMP_NUM_THREADS" else [value])]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        return None
    return int(parts[0])


def pillow(sources: Sources) -> Iterator[Finding]:
    """Which Pillow there is, and by what it reads JPEGs."""
    try:
        name = f"Pillow {sources.load('PIL').__version__}"
        turbo = sources.load("PIL.features").check_feature("libjpeg_turbo")
    except ImportError as error:
        yield Finding(topic="Pillow", value="not installed", level="note", meaning=str(error))
        return
    simd = sources.version("Pillow-SIMD")
    if simd is not None:
        name = f"Pillow-SIMD {simd}"
    if turbo:
        yield Finding(topic="Pillow", value=f"{name}, libjpeg-turbo")
        return
    yield Finding(
        topic="Pillow",
        value=f"{name}, without libjpeg-turbo" if turbo is False else f"{name}, libjpeg-turbo {NOT_KNOWN}",
        level="warning" if turbo is False else "note",
        meaning="JPEGs decode slower than they could",
        do="Install Pillow's own wheel, or use another decoder: pip install 'lightning-feed[images]'",
    )


def decoders(sources: Sources) -> Iterator[Finding]:
    """Other decoders that could be chosen, and the threads of OpenCV."""
    packages = {
        "simplejpeg": ("simplejpeg",),
        "turbojpeg": ("turbojpeg",),
        "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
        "torchvision": ("torchvision",),
    }
    there = [name for name, names in packages.items() if any(sources.version(one) for one in names)]
    missing = [name for name in packages if name not in there]
    yield Finding(
        topic="decoders",
        value=", ".join([*there, "pillow"]),
        level="note" if missing else "ok",
        meaning=f"not installed: {', '.join(missing)}; a faster one may be among them" if missing else "",
        do="pip install 'lightning-feed[images]'" if missing else "",
    )
    if "opencv" not in there:
        return
    count, usable = int(sources.load("cv2").getNumThreads()), read_machine(sources.root).usable_cpus
    yield Finding(
        topic="OpenCV threads",
        value=str(count),
        level="note" if count > 1 else "ok",
        meaning=f"in every worker, on {usable} usable CPUs; our loaders set it to fit" if count > 1 else "",
        do="In workers of your own: cv2.setNumThreads(0)" if count > 1 else "",
    )


def versions(sources: Sources) -> Iterator[Finding]:
    """Versions beside the oldest that are supported."""
    yield Finding(topic="python", value=".".join(map(str, sys.version_info[:3])))
    lowest = _lowest(sources.requirements())
    for name in PACKAGES:
        found = sources.version(name)
        least = lowest.get(name.replace("_", "-"))
        if found is None:
            # Of the two names of Lightning one is enough.
            other = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}.get(name)
            missing = other is None or sources.version(other) is None
            if missing:
                yield Finding(
                    topic=name,
                    value="not installed",
                    level="problem" if name == "torch" else "warning",
                    do=f"pip install '{name}{'' if least is None else f'>={least}'}'",
                )
            continue
        old = least is not None and _numbers(found) < _numbers(least)
        yield Finding(
            topic=name,
            value=found,
            level="problem" if old else "ok",
            meaning=f"older than {least}, the oldest that is supported" if old else "",
            do=f"pip install '{name}>={least}'" if old else "",
        )


def _lowest(requirements: list[str]) -> dict[str, str]:
    """Package, with dashes -> the version after ``>=``."""
    found: dict[str, str] = {}
    for line in requirements:
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?>=\s*([\d.]+)", line)
        if match:
            found[match[1].replace("_", "-").lower()] = match[2]
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, for comparing: ``"2.6.0+cu124"`` is (2, 6, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
