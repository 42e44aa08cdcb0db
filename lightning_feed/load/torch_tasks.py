"""The tasks, finished or open, that torch's iterator has given to its worker processes."""

from lightning_feed.load.kinds import AnyIterator


def kept_batches(iterator: AnyIterator) -> int:
    """Count the batches that torch's iterator keeps because an earlier batch is missing.

    A task is ``(worker,)``, or ``(worker, batch)`` if its batch is kept (``_task_info`` in torch 2.6 and 2.15).
    """
    tasks = iterator._task_info
    return sum(map(len, tasks.values())) - len(tasks)


def idle_share(iterator: AnyIterator) -> float:
    """Return the share of the workers that had no task while torch waited for the batch that it has just returned.

    These workers had finished later batches, which torch keeps. The newest task does not count, because torch gave it
    to a worker only after the wait. Returns 0 at the end of the data, where workers are idle in any case, and if
    torch's private attributes have changed.
    """
    try:
        tasks = iterator._task_info
        count = iterator._num_workers
        if not kept_batches(iterator) or len(tasks) < count * iterator._prefetch_factor:
            return 0.0
        newest = max(tasks)
        busy = {task[0] for number, task in tasks.items() if len(task) == 1 and number != newest}
    except (AttributeError, TypeError, ValueError, LookupError):
        return 0.0
    return float(min(count - len(busy), count - 1) / count)
