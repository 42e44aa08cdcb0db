"""Which worker and which sample it was that could not be loaded."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from lightning_feed.errors import DatasetError
from lightning_feed.load.epoch_order import drawing_device
from lightning_feed.load.untouched import untouched
from lightning_feed.load.variant import with_changes

_WORKER = re.compile(r"in DataLoader worker process (\d+)")


def blamed(parts: Sequence[Any], error: BaseException, came: int | None) -> DatasetError:
    """The error to raise for one that a loader raised.

    The sampler's draws are repeated up to the batch that failed, and its samples are made in this process: the one that
    raises the same kind of error is named.

    Args:
        parts: the loaders, as before the pass.
        error: what was raised.
        came: batches that came before, in the first pass; None: not known.
    """
    kind, text = _kind_and_text(error)
    worker = _WORKER.search(str(error))
    where = [f"worker {worker.group(1)}"] if worker else []
    if came is not None and len(parts) == 1 and not parts[0].stream:
        sample = _sample(parts[0], kind, came)
        where += [] if sample is None else [f"sample {sample}"]
    data = ", ".join(sorted({type(part.loader.dataset).__name__ for part in parts}))
    place = f" in {', '.join(where)}" if where else ""
    return DatasetError(f"Loading from the data set ({data}) failed{place}: {kind}: {text} Mend it, or leave it out.")


def _kind_and_text(error: BaseException) -> tuple[str, str]:
    """The class and the message; those of the original, where torch made one text of a worker's traceback."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    if lines and _WORKER.search(lines[0]):
        kind, _, text = lines[-1].partition(":")
        return kind.strip().rpartition(".")[2], _closed(text.strip())
    return type(error).__name__, _closed(str(error).strip())


def _closed(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _sample(part: Any, kind: str, came: int) -> Any:
    """The sample that failed; None where it cannot be told."""
    with untouched(part.loader):
        variant = with_changes(part.loader)
        # As torch does before it asks the sampler for anything.
        with drawing_device(variant.generator):
            torch.empty((), dtype=torch.int64).random_(generator=variant.generator)
            batched = variant.batch_sampler is not None
            source = variant.batch_sampler if batched else variant.sampler
            failed = next((batch for number, batch in enumerate(source or ()) if number == came), None)
        if failed is None:
            return None
        for index in failed if batched else [failed]:
            try:
                part.loader.dataset[index]
            except Exception as error:  # noqa: BLE001  # compared with the one that is being explained
                if type(error).__name__ == kind:
                    return index
    return None
