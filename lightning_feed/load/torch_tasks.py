"""The tasks that torch's iterator over worker processes has given out: finished, or open."""

from lightning_feed.load.kinds import AnyIterator


def kept_batches(iterator: AnyIterator) -> int:
    """Count the batches that torch's iterator keeps because an earlier one is missing.

    A task is ``(worker,)``, or ``(worker, batch)`` if kept (``_task_info`` in torch 2.6 and 2.15).
    """
    tasks = iterator._task_info
    return sum(map(len, tasks.values())) - len(tasks)


def idle_share(iterator: AnyIterator) -> float:
    """Return the share of the workers that had no task while torch waited for the batch that it has just returned.

    They had finished later batches, which torch keeps. Then it gave one of them the newest task. At the end of the data
    workers are idle in any case, so nothing counts then, nor where torch's parts are unknown.
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
