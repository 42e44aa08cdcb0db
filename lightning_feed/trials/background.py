"""A thread for a training loader that is not a DataLoader, kept if it makes the steps shorter."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_feed.load.ahead import BackgroundIterator
from lightning_feed.load.kinds import AnyLoader, Batch
from lightning_feed.load.random_state import DefaultGenerators
from lightning_feed.load.stage import Stage

DEPTH = 2
"""Batches that the thread keeps ready by default."""
WATCHED = 12
TRIED = 16
"""Number of measured steps, both without and with the thread."""
UNUSUAL = 3
"""Number of first steps, both without and with the thread, that are not compared."""
LEAST_WAIT = 0.05
"""Smallest share of a step spent in ``next()`` for the thread to be tried."""
WORSE = 0.05
"""Smallest relevant difference in step time, as a share. Smaller ones also occur within one setting."""
_MOST_STEPS = 1000


def taken_by(trainer: Any, given: int) -> float:
    """Return the batch count of this epoch at which training pauses next: for a validation, or at the epoch's end."""
    every: float = trainer.val_check_batch
    most: float = trainer.num_training_batches
    return most if not every or every == float("inf") else min(most, (given // int(every) + 1) * int(every))


def why_not_in_background(loader: object) -> str:
    """Return the reason why a thread cannot iterate a loader. Empty if it can."""
    kind = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        return f"the training loader ({kind}) cannot be iterated"
    if hasattr(loader, "state_dict"):  # checkpoints would count batches that were only drawn
        return f"the training loader ({kind}) has a state for checkpoints, and a thread would run ahead of it"
    return ""


TORCHS = "torch's default generator"
"""The generator used by Lightning, validation loaders and most models."""


class BackgroundTrial:
    """Decides from the training steps if a thread should iterate a training loader.

    Training draws the first batches itself. The thread is ruled out if the loader draws random numbers from torch's
    default generator, or from a generator of Python or NumPy that training uses too, or if its batches are on a device
    already. Otherwise the thread draws the next batches, and stays if that makes the steps shorter.

    The thread draws in portions that end, at the latest, where training pauses. Training itself draws the first
    batch of each pass and the first batch after each portion, and checks them in the same way.

    Args:
        name: name of the loader, for the log.
        say: called with one line per decision.
        asked: the user requested the thread. It is used unless there is a reason against it, without comparing steps.
        clock: returns the time in seconds.

    Attributes:
        state: ``watch`` and ``try`` during the trial, without and with the thread; ``on`` or ``off`` afterwards.
    """

    def __init__(
        self,
        name: str,
        say: Callable[[str], object],
        *,
        asked: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.state: Literal["watch", "try", "on", "off"] = "watch"
        self._name = name
        self._say = say
        self._asked = asked
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._waits: list[float] = []
        self._before_s = 0.0
        self._began: float | None = None
        self._drawn: DefaultGenerators | None = None
        """The generators' states after the last batch, if that batch was drawn without the thread."""
        self._by_loader: set[str] = set()
        self._by_training: set[str] = set()

    def begin_pass(self) -> None:
        """Begin a pass. Gives up the thread if the steps of the last pass were longer than without the thread."""
        self._began = self._drawn = None
        if self.state == "on" and not self._asked and len(self._steps) >= TRIED:
            after_s = self._step_s()
            if after_s > self._before_s * (1 + WORSE):
                self._end("off", f"draws from {self._name} as before: {self._compared(after_s)}")
            self._steps.clear()

    def begin_step(self) -> None:
        """Note that training requests a batch."""
        if self.state == "off":
            return
        began = self._began
        self._began = self._clock()
        if began is not None:
            self._steps.append(self._began - began)

    def draw(self, source: Iterator[Batch]) -> Batch:
        """Draw the next batch without the thread."""
        if self.state == "off":
            return next(source)
        if self._drawn is not None:
            self._by_training.update(self._drawn.used())
        generators = DefaultGenerators()
        began = self._clock()
        batch = next(source)
        self._waits.append(self._clock() - began)
        self._by_loader.update(generators.used())
        self._drawn = DefaultGenerators()
        if shared := sorted(self._by_loader & {TORCHS, *self._by_training}):
            why = f"it draws random numbers from {' and '.join(shared)}, and a thread would change the model's numbers"
            self._end("off", f"leaves {self._name} alone: {why}")
        elif any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves(batch)):
            self._end("off", f"leaves {self._name} alone: its batches are made on the device")
        return batch

    def ahead(self) -> float:
        """Return the number of next batches for the thread to draw."""
        if self.state == "watch" and len(self._steps) >= WATCHED:
            self._watched()
        if self.state == "try" and len(self._steps) >= TRIED:
            self._tried()
        count = {"watch": 0, "try": TRIED - len(self._steps), "on": float("inf"), "off": 0}[self.state]
        if count:
            self._drawn = None  # from now on loader and training may draw at the same time
        return count

    def _watched(self) -> None:
        wait_s = statistics.median(self._waits)
        self._before_s = self._step_s()
        if self._asked:
            self._end("on", f"draws from {self._name} in a thread. {self._random()}")
        elif wait_s < LEAST_WAIT * self._before_s:
            took = f"{1e3 * wait_s:.3g} of {1e3 * self._before_s:.3g} ms a step"
            self._end("off", f"leaves {self._name} alone: its batches take {took}")
        else:
            self.state = "try"
            self._steps.clear()

    def _tried(self) -> None:
        after_s = self._step_s()
        if after_s < self._before_s * (1 - WORSE):
            self._end("on", f"draws from {self._name} in a thread: {self._compared(after_s)}. {self._random()}")
        else:
            self._end("off", f"draws from {self._name} as before: {self._compared(after_s)}")

    def _step_s(self) -> float:
        return statistics.median(list(self._steps)[UNUSUAL:])

    def _compared(self, after_s: float) -> str:
        return f"steps take {1e3 * after_s:.3g} ms with a thread, and {1e3 * self._before_s:.3g} without"

    def _random(self) -> str:
        used = " and ".join(sorted(self._by_loader))
        seen = "There is no sign that it draws random numbers from a generator that training may also use"
        if used:
            seen = f"It draws random numbers from {used}, and there is no sign that training does"
        return f"The order of batches stays. {seen}; if it does, both get other numbers"

    def _end(self, state: Literal["on", "off"], line: str) -> None:
        self.state = state
        self._steps.clear()
        self._say(f"{line}.")


class BackgroundLoader:
    """A training loader that a thread iterates, once a :class:`BackgroundTrial` has decided so.

    Batches keep their order, and an error is raised in place of its batch. The thread never draws more of a pass than
    training takes. Other attributes are those of the loader.

    Args:
        source: the loader, any iterable.
        trial: decides.
        limit: takes the number of batches yielded in a pass, and returns the number at which training pauses: the end
            of the epoch, or a validation. May be infinite.
        depth: batches that the thread keeps ready.

    Attributes:
        source: as given.
        trial: as given.
    """

    def __init__(
        self, source: AnyLoader, trial: BackgroundTrial, *, limit: Callable[[int], float], depth: int = DEPTH
    ) -> None:
        self.source = source
        self.trial = trial
        self._limit = limit
        self._depth = depth
        self._pass: _Pass | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self.trial.begin_pass()
        self._pass = _Pass(iter(self.source), self.trial, self._limit, self._depth)
        return self._pass

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.source, name)

    def close(self) -> None:
        """End the thread of the current pass. A second call does nothing."""
        ended = self._pass
        self._pass = None
        if ended is not None:
            ended.close()


class _Pass(Stage):
    """One pass over the loader.

    Batches are drawn directly, or by a thread that draws only as many at a time as training will take.
    """

    def __init__(
        self, source: Iterator[Batch], trial: BackgroundTrial, limit: Callable[[int], float], depth: int
    ) -> None:
        self._source = source
        self._trial = trial
        self._limit = limit
        self._depth = depth
        self._ahead: BackgroundIterator | None = None
        self._given = 0
        self._until: float = 0
        """Number of the batch of this pass at which the thread's portion ends."""

    def __next__(self) -> Batch:
        self._trial.begin_step()
        if self._ahead is not None and self._given >= self._until:
            self.close()
        elif self._ahead is None and self._given:
            self._begin_portion()
        batch = self._trial.draw(self._source) if self._ahead is None else next(self._ahead)
        self._given += 1
        return batch

    def _begin_portion(self) -> None:
        count = self._trial.ahead()
        if count:
            count = min(count, self._limit(self._given) - self._given)
        if count < 1:
            return
        self._until = self._given + count
        portion = self._source if count == float("inf") else islice(self._source, int(count))
        self._ahead = BackgroundIterator(portion, self._depth)

    def close(self) -> None:
        """End the thread."""
        ahead = self._ahead
        self._ahead = None
        if ahead is not None:
            ahead.close()
