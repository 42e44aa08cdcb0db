"""Tuning results remembered between runs: one file for each machine, data set, batch size and set of versions."""

import hashlib
import json
import logging
import math
import platform
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.archive.files import cache_folder, read_private, write_private
from lightning_feed.archive.memory import read_text
from lightning_feed.load.build import size_of
from lightning_feed.load.machine import Machine
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.throughput import watchdog
from lightning_feed.load.trials.search import Goal, Tuned
from lightning_feed.load.trials.trial import Setting, Trial, leaf_sizes

logger = logging.getLogger(__name__)

_VERSION = 1
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SAMPLE_S = 10.0
_NESTED = 6
_DEMAND_STEP = 1.25
_MEMORY_STEP = 4.0
"""Sizes within such a factor are of one class: free memory changes from minute to minute."""


class Store:
    """A folder of results. One that cannot be read or written is as good as none, and is no error.

    Args:
        folder: None for ``tuning`` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder() / "tuning"

    def load(self, key: dict[str, Any]) -> Tuned | None:
        """What was saved under ``key``; None where there is nothing that fits."""
        path = self._path(key)
        try:
            kept = json.loads(read_private(path))
            if kept["version"] != _VERSION or kept["key"] != key:
                logger.debug(
                    "The remembered result of tuning in %s is of another version, so tuning begins anew.", path
                )
                return None
            return _tuned(kept["tuned"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:  # cut short, or of something else
            logger.debug("The remembered result of tuning in %s cannot be read (%s): tuning begins anew.", path, error)
            return None

    def save(self, key: dict[str, Any], tuned: Tuned) -> None:
        """Remember a result, in place of what was saved under ``key``."""
        path = self._path(key)
        text = json.dumps({"version": _VERSION, "key": key, "tuned": asdict(tuned)}, indent=1)
        try:
            write_private(path, text.encode())
        except OSError as error:
            logger.info("The result of tuning could not be remembered in %s: %s. The next run tunes anew.", path, error)

    def _path(self, key: dict[str, Any]) -> Path:
        text = json.dumps([_VERSION, key], sort_keys=True)
        return self.folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"


def key_of(loader: DataLoader[Any], goal: Goal, machine: Machine, version: str) -> dict[str, Any]:
    """What must be the same for a result to hold: machine, data set, batch size, versions, what was looked for.

    One sample is made, unless that takes long or fails: then the key goes without its shape.

    Args:
        loader: what is tuned.
        goal: what for.
        machine: its limits.
        version: of this package.
    """
    return {
        "machine": {
            "host": socket.gethostname(),
            "cpu": _cpu_model(),
            "cpus": machine.cpu_time or machine.usable_cpus,
            "memory": _class_of(machine.available_memory_bytes, _MEMORY_STEP),
            "shm": _class_of(machine.free_shm_bytes, _MEMORY_STEP),
        },
        "data": _data(loader),
        "batch_size": loader.batch_size,
        "batches": _described(loader.batch_sampler),
        "collate": _described(loader.collate_fn),
        "loader": [_name(loader), getattr(loader, "background", 0), _described(loader.multiprocessing_context)],
        "versions": [version, str(torch.__version__), platform.python_version()],
        "goal": [
            _class_of(goal.demand_per_s, _DEMAND_STEP),
            goal.local_ranks,
            goal.device_type,
            goal.most_workers,
            False,  # in earlier versions batches could be given in another order
            goal.may_persist,
        ],
    }


def _tuned(kept: dict[str, Any]) -> Tuned:
    kept["setting"] = Setting(**kept["setting"])
    kept["trials"] = tuple(Trial(**{**one, "setting": Setting(**one["setting"])}) for one in kept["trials"])
    kept["rejected"] = tuple((Setting(**setting), why) for setting, why in kept["rejected"])
    kept["options"] = tuple(kept["options"])
    tuned = Tuned(**kept)
    if not tuned.batches_per_s or tuned.settings.num_workers == "auto":  # settings refuses impossible values
        raise ValueError(f"{tuned} cannot be used")
    return tuned


def _data(loader: DataLoader[Any]) -> dict[str, Any]:
    dataset, parts = loader.dataset, []
    for _ in range(_NESTED):
        transforms = {
            name: _described(getattr(dataset, name))
            for name in ("transform", "transforms", "target_transform")
            if getattr(dataset, name, None) is not None
        }
        parts.append([_name(dataset), size_of(dataset), transforms])
        inner = getattr(dataset, "dataset", None)
        if inner is None:
            break
        dataset = inner
    return {"parts": parts, "sample": _sample(loader)}


def _sample(loader: DataLoader[Any]) -> list[Any] | None:
    """Sizes of the tensors of the first sample; None where there is none to be had."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        with preserve_state(loader):
            sample = watchdog(
                lambda _: loader.dataset[0], silent_s=_SAMPLE_S, unblock=lambda: False, what=lambda _: "no sample came"
            )
    except Exception as error:  # noqa: BLE001  # whatever a data set raises, the trials will name it
        logger.debug("The first sample could not be made for the key of the result: %s", error)
        return None
    return leaf_sizes(sample)


def _name(thing: Any) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _described(thing: Any) -> str:
    """Its name or repr, without what differs from run to run."""
    if thing is None:
        return ""
    named = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', '')}.{named}" if named else _ADDRESS.sub("", repr(thing))[:2000]


def _class_of(size: float | None, step: float) -> int | None:
    """A number that stays the same while ``size`` changes little."""
    return None if size is None or size <= 0 else math.floor(math.log(size, step))


def _cpu_model() -> str:
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
