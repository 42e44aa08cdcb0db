"""The whole look: every topic on its own, so that one that fails hides no other."""

from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_feed.errors import SettingsError
from lightning_feed.watch.doctor import device_decode_findings, gpu_findings, machine_findings, software_findings
from lightning_feed.watch.doctor.finding import NOT_KNOWN, Finding
from lightning_feed.watch.doctor.sources import Sources
from lightning_feed.watch.experiments.storage import file_system

LOOKS: dict[str, Callable[[Sources], Iterator[Finding]]] = {
    "CPUs": machine_findings.cpus,
    "CPU clock": machine_findings.clock,
    "memory": machine_findings.memory,
    "/dev/shm": machine_findings.shared_memory,
    "open files": machine_findings.limits,
    "container": machine_findings.container,
    "GPU": gpu_findings.gpus,
    "pinned memory": gpu_findings.pinned_memory,
    "threads": software_findings.threads,
    "Pillow": software_findings.pillow,
    "decoders": software_findings.decoders,
    "DALI": device_decode_findings.dali,
    "nvJPEG": device_decode_findings.nvjpeg,
    "torchcodec": device_decode_findings.torchcodec,
    "versions": software_findings.versions,
}
"""Topic, for when a look fails -> the look."""


def examine(data: Path | None = None, sources: Sources | None = None) -> list[Finding]:
    """Look at everything that matters to feeding a GPU. Takes about as long as ``import torch``.

    Args:
        data: a file or folder of the dataset, to see on which file system it lies.
        sources: what to read from; None is this machine.

    Raises:
        SettingsError: when ``data`` is not there.
    """
    sources = Sources() if sources is None else sources
    if data is not None and not data.exists():
        raise SettingsError(f"--data {data}: there is no such file or folder. Give the folder that the samples lie in.")
    found: list[Finding] = []
    for topic, look in LOOKS.items():
        _collect(found, topic, lambda look=look: look(sources))  # type: ignore[misc]
    if data is not None:
        _collect(found, "data", lambda: _data(data, sources))
    return found


def _collect(found: list[Finding], topic: str, look: Callable[[], Iterator[Finding]]) -> None:
    try:
        for one in look():  # what was found before a failure is kept
            found.append(one)
    except Exception as error:  # noqa: BLE001  # any broken source is a finding of its own
        words = str(error).partition("\n")[0]
        found.append(
            Finding(topic=topic, value=NOT_KNOWN, level="note", meaning=f"{type(error).__name__}: {words}".rstrip(": "))
        )


def _data(path: Path, sources: Sources) -> Iterator[Finding]:
    system, kind = file_system(path, sources.root)
    if system is None:
        yield Finding(topic="data", value=NOT_KNOWN, level="note", meaning="/proc/self/mountinfo does not tell")
    elif kind == "network":
        yield Finding(
            topic="data",
            value=f"{system}, over a network",
            level="warning",
            meaning="each file is a round trip, and others share the line",
            do="Copy it to a local disk or memory (lightning-feed stage), or pack it (lightning-feed pack).",
        )
    elif kind == "rotational":
        yield Finding(
            topic="data",
            value=f"{system}, on a disk that calls itself rotating",
            level="warning",
            meaning="a seek of some milliseconds for each small file in random order; virtual disks often only say so",
            do="Pack it (lightning-feed pack), or stage it to an SSD or memory (lightning-feed stage).",
        )
    elif kind == "overlay":
        yield Finding(
            topic="data",
            value=f"{system}, the container's own layers",
            level="note",
            meaning="opening files is slower here, and the disk below is not known",
            do="Mount the data as a volume.",
        )
    else:
        yield Finding(topic="data", value=f"{system}, {'in memory' if kind == 'memory' else 'on a local disk'}")
