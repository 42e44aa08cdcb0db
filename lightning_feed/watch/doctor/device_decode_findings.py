"""What could decode images in place of the workers: DALI, nvJPEG in torchvision, torchcodec."""

from collections.abc import Iterator
from typing import Any

from lightning_feed.watch.doctor.finding import NOT_KNOWN, Finding, Level
from lightning_feed.watch.doctor.sources import Sources

DALI_PACKAGES = {12: "nvidia-dali-cuda120", 13: "nvidia-dali-cuda130"}
"""CUDA -> the package of DALI."""
OLDEST_DALI = 2


def dali(sources: Sources) -> Iterator[Finding]:
    """Which DALI there is, and whether it is of torch's CUDA. It is not imported."""
    there = {cuda: sources.version(package) for cuda, package in DALI_PACKAGES.items()}
    installed = {cuda: version for cuda, version in there.items() if version is not None}
    ours = _torch_cuda(sources)
    install = f"pip install {DALI_PACKAGES[12 if ours is not None and ours < 13 else 13]}"
    if not installed:
        yield Finding(
            topic="DALI",
            value="not installed",
            level="ok" if ours is None else "note",
            meaning='backend="dali-gpu" and "dali-cpu" need it; see whether decoding limits: lightning-feed diagnose',
            do="" if ours is None else install,
        )
        return
    value = ", ".join(f"{version} for CUDA {cuda}" for cuda, version in installed.items())
    level: Level = "ok"
    meaning, do = "", ""
    if len(installed) > 1:
        level, meaning = "warning", "two builds of one module: which of them is imported is left to chance"
        do = f"pip uninstall --yes {' '.join(DALI_PACKAGES[cuda] for cuda in installed)} && {install}"
    elif ours is not None and ours not in installed:
        level, meaning = "warning", f"torch is built for CUDA {ours}: dali-gpu refuses it, dali-cpu works"
        if ours in DALI_PACKAGES:
            do = f"pip uninstall --yes {' '.join(DALI_PACKAGES[cuda] for cuda in installed)} && {install}"
    elif any(_first_number(version) < OLDEST_DALI for version in installed.values()):
        level, meaning = "warning", f"older than {OLDEST_DALI}.0, the oldest that is supported"
        do = install.replace("install", "install --upgrade", 1)
    elif ours is None:
        meaning = "this torch has no CUDA: dali-cpu works, dali-gpu does not"
    yield Finding(topic="DALI", value=value, level=level, meaning=meaning, do=do)


def nvjpeg(sources: Sources) -> Iterator[Finding]:
    """Whether torchvision can decode JPEGs on the GPU, as far as its build tells."""
    ours = _torch_cuda(sources)
    if sources.version("torchvision") is None:
        return  # named with the versions
    try:
        built = getattr(sources.load("torchvision.version"), "cuda", None)
        operators = sources.load("torch").ops.image
        sources.load("torchvision.io")
        there = hasattr(operators, "decode_jpegs_cuda")
    except (ImportError, RuntimeError, AttributeError) as error:
        yield Finding(topic="nvJPEG", value=NOT_KNOWN, level="note", meaning=f"{type(error).__name__}: {error}")
        return
    if built is not None and there:
        # No build says so itself; torchvision's own for CUDA are made with nvJPEG.
        yield Finding(topic="nvJPEG", value="in torchvision", meaning='backend="nvjpeg" decodes on the GPU by it')
    elif ours is None:
        yield Finding(topic="nvJPEG", value="not in torchvision", meaning="this torch has no CUDA to decode on")
    else:
        yield Finding(
            topic="nvJPEG",
            value="not in torchvision",
            level="note",
            meaning='this torchvision is built without CUDA, so backend="nvjpeg" cannot be used',
            do=f"pip install torchvision --index-url https://download.pytorch.org/whl/cu{_digits(sources)}",
        )


def torchcodec(sources: Sources) -> Iterator[Finding]:
    """Whether the successor of torchvision's decoders is there. None of our backends needs it."""
    found = sources.version("torchcodec")
    meaning = "" if found is not None else "not needed: backends here decode with torchvision, DALI or on the CPU"
    yield Finding(topic="torchcodec", value=found or "not installed", meaning=meaning)


def _torch_cuda(sources: Sources) -> int | None:
    """First number of the CUDA that torch is built for; None without."""
    try:
        built: Any = sources.load("torch").version.cuda
    except ImportError:
        return None
    return None if built is None else _first_number(str(built))


def _digits(sources: Sources) -> str:
    return str(sources.load("torch").version.cuda).replace(".", "")


def _first_number(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0
