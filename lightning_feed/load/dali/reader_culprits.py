"""Which files a DALI pipeline could not decode, where DALI does not say."""

import re
from collections.abc import Sequence
from typing import Any

from lightning_feed.load.dali.install import require_dali

FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""What DALI raises for an operator that failed, by the kind of failure (read in 2.4.0)."""
_DECODING = re.compile(r"decode|peek_image_shape")
_NAMES_IT = re.compile(r"Failed to decode sample #\d+ : \S|File mapping failed: \S")
_LOOKED_THROUGH = 200_000
"""Samples that are read again at most, to get to the batch that failed: some 30 us each, of files in memory."""


def undecodable(images: Sequence[Any], pipeline: Any, error: Exception, *, before: int) -> list[str]:
    """The files, or the places in archives, of the batch that failed that DALI's decoder refuses.

    The readers go through their set once more, without a decoder, as far as that batch: DALI reads in the order that
    the readers' seeds decide. Each of its images is then decoded by itself, on the CPU.

    Args:
        images: what readers gave to decoders, as nodes.
        pipeline: that the nodes are of. It is not run.
        error: what DALI raised.
        before: batches that the readers gave before, since their beginning.

    Returns:
        None where DALI named the file, or it cannot be found: its reader tells no names, or a search would be long.
    """
    size, said = pipeline.max_batch_size, str(error)
    if not images or not _DECODING.search(said) or _NAMES_IT.search(said) or before * size > _LOOKED_THROUGH:
        return []
    try:
        return _search(images, pipeline, before)
    except FAILURES:  # a reader that fails by itself: DALI's first error says what there is to say
        return []


def _search(images: Sequence[Any], pipeline: Any, before: int) -> list[str]:
    again = require_dali(gpu=False).Pipeline(
        batch_size=pipeline.max_batch_size, num_threads=pipeline.num_threads, device_id=None
    )
    again.set_outputs(*images)
    again.build()
    for _ in range(before):
        again.run()
    samples = [sample for output in again.run() for sample in output]
    found = [sample.source_info() for sample in samples if sample.source_info() and not _is_image(sample)]
    return list(dict.fromkeys(found))  # the last of a share may be there several times


def _is_image(encoded: Any) -> bool:
    dali = require_dali(gpu=False)
    alone = dali.Pipeline(batch_size=1, num_threads=1, device_id=None)
    with alone:
        data = dali.fn.external_source(lambda: [encoded])
        alone.set_outputs(dali.fn.decoders.image(data))
    alone.build()
    try:
        alone.run()
    except FAILURES:
        return False
    return True
