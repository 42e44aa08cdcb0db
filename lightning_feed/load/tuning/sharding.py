"""Whether an iterable data set divides itself among workers, found out by letting it believe that it is in one."""

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from lightning_feed.load.untouched import untouched
from lightning_feed.load.watched import watched

_WAIT_S = 10.0


class _Observed:
    """Stands in for torch's WorkerInfo, as the second of two, and notes who asks."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.seed = 1
        self.asked = False

    @property
    def id(self) -> int:
        """The worker's number."""
        self.asked = True
        return 1

    @property
    def num_workers(self) -> int:
        """How many there are."""
        self.asked = True
        return 2


def divides_itself(loader: DataLoader[Any]) -> bool:
    """Whether the data set of a loader asks which worker it is in, by the time it gives its first sample.

    False where it gives none, or raises. ``get_worker_info`` reads a private name (``_worker_info``; torch 2.6 and
    2.15); where that is gone, nobody is seen to ask.
    """
    observed = _Observed(loader.dataset)

    def first_sample(_: Any) -> None:
        next(iter(loader.dataset), None)

    before = getattr(worker, "_worker_info", None)
    with untouched(loader):
        try:
            worker._worker_info = observed  # type: ignore[assignment]
            watched(first_sample, silent_s=_WAIT_S, unblock=lambda: False, what=lambda _: "no sample came")
        except Exception:  # noqa: BLE001  # whatever a data set raises, the trials will name it
            return False
        finally:
            worker._worker_info = before
    return observed.asked
