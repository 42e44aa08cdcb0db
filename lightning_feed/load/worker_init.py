"""What each worker process does first: one thread for itself, and random numbers of its own."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_feed.load import worker_stack

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
"""Read by libraries when they are loaded, so these count for what the dataset imports later."""


@dataclass(frozen=True)
class WorkerInit:
    """The ``worker_init_fn`` of our loaders: it can be pickled, so that it serves spawned workers too.

    Workers are the parallelism: one that opened a pool of threads of its own would only take CPUs from the others.
    """

    rank: int = 0
    """The rank of the training process: ranks must not draw the same random numbers."""
    seed_worker: Callable[[int, int], None] | None = None
    """Called with ``(worker_id, rank)`` to seed all generators, when ``seed_everything(workers=True)`` was."""
    then: Callable[[int], None] | None = None
    """A ``worker_init_fn`` of the user's, called last with the worker's number."""

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process that this runs in."""
        worker_stack.answer()
        torch.set_num_threads(1)
        for variable in ONE_THREAD:
            os.environ.setdefault(variable, "1")
        cv2 = sys.modules.get("cv2")
        if cv2 is not None:
            cv2.setNumThreads(0)  # 0: no pool at all; a pool does not survive a fork
        if self.seed_worker is not None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            self.seed_worker(worker_id, self.rank)
        if self.then is not None:
            self.then(worker_id)
