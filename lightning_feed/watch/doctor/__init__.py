"""The doctor: one look at the machine and the environment, for what would keep a GPU from being fed."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lightning_feed.errors import SettingsError
from lightning_feed.watch.doctor import machine_findings, software_findings
from lightning_feed.watch.doctor.finding import NOT_KNOWN, Finding, Sources

Look = Callable[[Sources], Iterator[Finding]]

LOOKS: dict[str, Look] = {
    "CPUs": machine_findings.cpus,
    "CPU clock": machine_findings.clock,
    "memory": machine_findings.memory,
    "/dev/shm": machine_findings.shared_memory,
    "open files": machine_findings.open_files,
    "container": machine_findings.container,
    "GPU": machine_findings.gpus,
    "pinned memory": machine_findings.pinned_memory,
    "threads": software_findings.threads,
    "Pillow": software_findings.pillow,
    "decoders": software_findings.decoders,
    "DALI": software_findings.dali,
    "nvJPEG": software_findings.nvjpeg,
    "torchcodec": software_findings.torchcodec,
    "versions": software_findings.versions,
}
"""Topic, for when a look fails -> the look."""


def examine(data: Path | None = None, sources: Sources | None = None) -> list[Finding]:
    """Look at everything that matters to feeding a GPU. Takes about as long as ``import torch``.

    A look that fails is a finding of its own, and hides no other.

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
    looks = dict(LOOKS)
    if data is not None:
        looks["data"] = partial(machine_findings.data, data)
    for topic, look in looks.items():
        try:
            for one in look(sources):  # what was found before a failure is kept
                found.append(one)
        except Exception as error:  # noqa: BLE001  # any broken source is a finding of its own
            words = str(error).partition("\n")[0]
            found.append(Finding(topic, NOT_KNOWN, "note", f"{type(error).__name__}: {words}".rstrip(": ")))
    return found
