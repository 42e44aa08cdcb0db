"""Threads, decoders, DALI, nvJPEG and versions."""

import platform
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from lightning_feed.load.machine import read_machine
from lightning_feed.watch.doctor.finding import Finding, Level, Sources
from lightning_feed.watch.doctor.machine_findings import torch_cuda

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
DECODERS = {
    "simplejpeg": ("simplejpeg",),
    "turbojpeg": ("turbojpeg",),
    "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
    "torchvision": ("torchvision",),
}
"""Decoder -> the packages that bring it."""
DALI_PACKAGES = {12: "nvidia-dali-cuda120", 13: "nvidia-dali-cuda130"}
"""CUDA -> the package of DALI."""
OLDEST_DALI = 2


def threads(sources: Sources) -> Iterator[Finding]:
    """Thread-count variables, and torch's threads, beside the usable CPUs."""
    usable = read_machine(sources.root).usable_cpus
    given = {name: sources.environ[name] for name in THREAD_VARIABLES if sources.environ.get(name)}
    yield from _thread_variables(given, usable)
    count = int(sources.load("torch").get_num_threads())
    yield Finding(
        "torch threads",
        str(count),
        "warning",
        f"more than the {usable} usable CPUs: torch sees the machine, not the quota",
        f"OMP_NUM_THREADS={usable}, or torch.set_num_threads({usable}).",
    ).only_if(count > usable)


def _thread_variables(given: dict[str, str], usable: int) -> Iterator[Finding]:
    topic, shown = "thread variables", ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    counts = {name: _thread_count(name, value) for name, value in given.items()}
    invalid = ", ".join(f"{name}={given[name]}" for name, count in counts.items() if count is None)
    most = max((count for count in counts.values() if count is not None), default=0)
    if invalid:
        meaning = f"{invalid}: no number of threads, so it is ignored, or stops what reads it"
        yield Finding(topic, shown, "warning", meaning, f"Set a whole number from 1 to {usable}, or leave it out.")
    if most > usable:
        meaning = f"more threads than the {usable} usable CPUs: they take turns and slow each other"
        yield Finding(topic, shown, "warning", meaning, f"Set them to {usable} or less, or leave them out.")
    elif not invalid:
        yield Finding(
            topic,
            shown,
            "note",
            "right for workers; in the main process CPU operations use one thread (torchrun sets it so)",
            "Leave it out where the model trains on the CPU.",
        ).only_if(1 in counts.values() and usable > 1)


def _thread_count(name: str, value: str) -> int | None:
    """Threads that a variable asks for; None where that is no number of them.

    OpenMP's may be a list, a number for each level of nesting, of which the first counts here. What libgomp takes for a
    number was tried with torch 2.15: spaces and a plus sign, no 0, no hexadecimal one.
    """
    parts = [part.strip().removeprefix("+") for part in (value.split(",") if name == "OMP_NUM_THREADS" else [value])]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        return None
    return int(parts[0])


# --- decoders -----------------------------------------------------------------------------------------------------


def pillow(sources: Sources) -> Iterator[Finding]:
    """Which Pillow there is, and by what it reads JPEGs."""
    simd = sources.version("Pillow-SIMD")
    name = f"Pillow {sources.load('PIL').__version__}" if simd is None else f"Pillow-SIMD {simd}"
    if sources.load("PIL.features").check_feature("libjpeg_turbo"):
        yield Finding("Pillow", f"{name}, libjpeg-turbo")
        return
    do = "Install Pillow's own wheel, or use another decoder: pip install 'lightning-feed[images]'"
    yield Finding("Pillow", f"{name}, without libjpeg-turbo", "warning", "JPEGs decode slower than they could", do)


def decoders(sources: Sources) -> Iterator[Finding]:
    """Other decoders that could be chosen, and the threads of OpenCV."""
    there = [name for name, packages in DECODERS.items() if any(sources.version(one) for one in packages)]
    missing = ", ".join(name for name in DECODERS if name not in there)
    meaning = f"not installed: {missing}; a faster one may be among them"
    install = "pip install 'lightning-feed[images]'"
    yield Finding("decoders", ", ".join([*there, "pillow"]), "note", meaning, install).only_if(bool(missing))
    if "opencv" in there:
        count, usable = int(sources.load("cv2").getNumThreads()), read_machine(sources.root).usable_cpus
        meaning = f"in every worker, on {usable} usable CPUs; our loaders set it to fit"
        do = "In workers of your own: cv2.setNumThreads(0)"
        yield Finding("OpenCV threads", str(count), "note", meaning, do).only_if(count > 1)


def dali(sources: Sources) -> Iterator[Finding]:
    """Which DALI there is, and whether it is of torch's CUDA. It is not imported."""
    there = {cuda: sources.version(package) for cuda, package in DALI_PACKAGES.items()}
    installed = {cuda: Version(version) for cuda, version in there.items() if version is not None}
    built = torch_cuda(sources)
    ours = None if built is None else built[0]
    install = f"pip install {DALI_PACKAGES[12 if ours is not None and ours < 13 else 13]}"
    again = f"pip uninstall --yes {' '.join(DALI_PACKAGES[cuda] for cuda in installed)} && {install}"
    value = ", ".join(f"{version} for CUDA {cuda}" for cuda, version in installed.items())
    if not installed:
        meaning = 'backend="dali-gpu" and "dali-cpu" need it; see whether decoding limits: lightning-feed diagnose'
        bare = Finding("DALI", "not installed", meaning=meaning)
        yield bare if ours is None else Finding("DALI", "not installed", "note", meaning, install)
    elif len(installed) > 1:
        meaning = "two builds of one module: which of them is imported is left to chance"
        yield Finding("DALI", value, "warning", meaning, again)
    elif ours is not None and ours not in installed:
        meaning = f"torch is built for CUDA {ours}: dali-gpu refuses it, dali-cpu works"
        yield Finding("DALI", value, "warning", meaning, again if ours in DALI_PACKAGES else "")
    elif any(version.major < OLDEST_DALI for version in installed.values()):
        meaning = f"older than {OLDEST_DALI}.0, the oldest that is supported"
        yield Finding("DALI", value, "warning", meaning, install.replace("install", "install --upgrade", 1))
    elif ours is None:
        yield Finding("DALI", value, meaning="this torch has no CUDA: dali-cpu works, dali-gpu does not")
    else:
        yield Finding("DALI", value)


def nvjpeg(sources: Sources) -> Iterator[Finding]:
    """Whether torchvision can decode JPEGs on the GPU, as far as its build tells."""
    if sources.version("torchvision") is None:
        return  # named with the versions
    ours, built = torch_cuda(sources), getattr(sources.load("torchvision.version"), "cuda", None)
    sources.load("torchvision.io")  # which registers the operators
    if built is not None and hasattr(sources.load("torch").ops.image, "decode_jpegs_cuda"):
        # No build says so itself; torchvision's own for CUDA are made with nvJPEG.
        yield Finding("nvJPEG", "in torchvision", meaning='backend="nvjpeg" decodes on the GPU by it')
    elif ours is None:
        yield Finding("nvJPEG", "not in torchvision", meaning="this torch has no CUDA to decode on")
    else:
        meaning = 'this torchvision is built without CUDA, so backend="nvjpeg" cannot be used'
        do = f"pip install torchvision --index-url https://download.pytorch.org/whl/cu{ours[0]}{ours[1]}"
        yield Finding("nvJPEG", "not in torchvision", "note", meaning, do)


def torchcodec(sources: Sources) -> Iterator[Finding]:
    """Whether the successor of torchvision's decoders is there. None of our backends needs it."""
    found = sources.version("torchcodec")
    meaning = "" if found is not None else "not needed: backends here decode with torchvision, DALI or on the CPU"
    yield Finding("torchcodec", found or "not installed", meaning=meaning)


# --- versions -----------------------------------------------------------------------------------------------------


def versions(sources: Sources) -> Iterator[Finding]:
    """Versions beside the oldest that are supported."""
    yield Finding("python", platform.python_version())
    needed = {canonicalize_name(one.name): one.specifier for one in map(Requirement, sources.requirements() or ())}
    lightnings = ("lightning", "pytorch_lightning")
    for name in ("torch", "torchvision", *lightnings):
        found, wanted = sources.version(name), needed.get(canonicalize_name(name), SpecifierSet())
        if found is not None:
            meaning = f"older than {str(wanted).removeprefix('>=')}, the oldest that is supported"
            old = not wanted.contains(found, prereleases=True)
            yield Finding(name, found, "problem", meaning, f"pip install '{name}{wanted}'").only_if(old)
        elif name not in lightnings or not any(map(sources.version, lightnings)):  # of the two one is enough
            level: Level = "problem" if name == "torch" else "warning"
            yield Finding(name, "not installed", level, do=f"pip install '{name}{wanted}'")
