"""Outputs of DALI pipelines as torch tensors: one tensor each, which stays as it is."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali")

from nvidia.dali import Pipeline, fn, types

from lightning_feed.errors import DatasetError
from lightning_feed.load.dali.binding import take_outputs


def counting(batches: int) -> Any:
    """Batch k holds k in each place; the second output is its double, of another shape."""

    def numbers() -> Any:
        for number in range(batches):
            yield [np.full((3, 2), number, np.int32)] * 4

    pipeline = Pipeline(batch_size=4, num_threads=1, device_id=None, prefetch_queue_depth=2, exec_dynamic=True)
    with pipeline:
        given = fn.external_source(source=numbers(), dtype=types.INT32)
        pipeline.set_outputs(given + 0, fn.reshape(given * 2, shape=[6]))
    pipeline.build()
    return pipeline


def test_what_was_taken_stays_as_it_is() -> None:
    pipeline = counting(20)
    taken = []
    for _ in range(15):
        pipeline.schedule_run()
        taken.append(take_outputs(pipeline))
    del pipeline
    torch.rand(1 << 16)
    for number, (numbers, doubles) in enumerate(taken):
        assert numbers.shape == (4, 3, 2)
        assert doubles.shape == (4, 6)
        assert numbers.dtype == doubles.dtype == torch.int32
        assert numbers.unique().tolist() == [number]
        assert doubles.unique().tolist() == [2 * number]


def test_the_end_of_a_source_is_the_end() -> None:
    pipeline = counting(3)
    for _ in range(3):
        pipeline.schedule_run()
        take_outputs(pipeline)
    pipeline.schedule_run()
    with pytest.raises(StopIteration):
        take_outputs(pipeline)


def test_samples_of_several_shapes_are_told() -> None:
    pipeline = Pipeline(batch_size=3, num_threads=1, device_id=None)
    with pipeline:
        given = fn.external_source(source=lambda: [np.zeros((side, 2), np.uint8) for side in (3, 5, 4)])
        pipeline.set_outputs(given + 0)
    pipeline.build()
    pipeline.schedule_run()
    with pytest.raises(
        DatasetError, match=r"Output 0 .* 3 shapes, \(3, 2\) to \(5, 2\): .* fn.resize, fn.crop or fn.pad"
    ):
        take_outputs(pipeline)
