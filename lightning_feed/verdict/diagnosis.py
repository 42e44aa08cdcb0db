"""Diagnosis and Remedy: the output of a verdict, as frozen values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_feed.measure.measurements import Measurements
from lightning_feed.measure.stats import Confidence, StarvationStats

Bottleneck = Literal["data", "copy", "framework", "compute", "validation", "checkpoints", "unknown"]
Grade = Literal["OK", "slightly data-bound", "moderately data-bound", "highly data-bound", "not measured"]
Cause = Literal[
    "hooks", "synchronisation",
    "unpinned", "not overlapped", "link", "small tensors", "transfer hooks",
    "epoch start", "no workers", "head of line", "pin thread", "oversubscribed", "cpu", "cold reads", "waiting",
    "hand-over", "jitter", "one rank",
    "compute", "launch", "unknown",
]  # fmt: skip
"""The cause within a bottleneck.

framework: ``hooks`` (callbacks, logging, checkpoints), ``synchronisation`` (the host waits for the device).
copy: ``unpinned``, ``not overlapped`` (pinned, but copied on the compute stream), ``link`` (the speed of the link is
the limit), ``small tensors``, ``transfer hooks`` (on the CPU, where nothing is copied: the user's hooks or
``device_transform``).
data: ``epoch start`` (workers are started again), ``no workers``, ``head of line`` (a slow batch delays finished
batches), ``pin thread``, ``oversubscribed`` (more runnable threads than CPUs, or a CPU quota), ``cpu`` (decoding,
augmenting), ``cold reads`` (from a local or network disk), ``waiting`` (not for storage: locks, sleeping),
``hand-over`` (batches are ready, and handing them over takes the time), ``jitter`` (loading is fast enough on average,
but not always), ``one rank`` (the other ranks wait for it).
compute: ``compute``; or, if the device was seen idle within the step itself, ``launch`` (the host issues work more
slowly than the device does it), ``synchronisation`` (the host waits for the device, and issues nothing meanwhile), or
``unknown``. If the model alone is much faster than the step: ``oversubscribed`` (tasks wait for a CPU), or ``unknown``.
"""


Form = Literal["arguments", "settings", "datamodule", "replacement", "override", "trainer", "callback", "command"]
"""The kind of text in a remedy's ``code``, so that programs can apply it, too.

``arguments``: keyword arguments for the call that makes the training loader. They replace present values.
``settings``: arguments for LoaderSettings, which a FastDataModule takes as ``loader=`` and ``FastDataModule.wrap`` as
its second argument. ``datamodule``: arguments for the call that makes the data module. ``trainer``: arguments for the
Trainer. ``override``: text for the command line of LightningCLI. ``callback``: a callback to add to the Trainer's
callbacks; if a callback of its class is present, the present callback gets these arguments. ``replacement``: a data
module for ``trainer.fit`` in place of the training loader, with ``...`` for parts that the user has to fill in.
``command``: a shell command to run once; ``where`` has the change to make afterwards.
"""


Effect = Literal["random numbers", "copies of the dataset", "order", "pixels", "memory"]
"""Effect of a change besides saving time.

``random numbers``: those drawn in workers differ, as they do with torch if the number of workers changes.
``copies of the dataset``: workers keep theirs from epoch to epoch, so they do not see what the program changes in it.
``order``: of batches, which becomes random. ``pixels``: they differ by a level or two. ``memory``: more of it is used.
"""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change to make."""

    code: str
    """The text to paste: see :data:`Form`."""
    form: Form | None = None
    """The kind of text in ``code``; None if unknown."""
    where: str = ""
    """The change and where to make it: ``num_workers: 0 -> 2 in your training DataLoader (Data.train_dataloader,
    data.py:41)``."""
    why: str
    """The reason why the change helps."""
    least_step_ms: float | None = None
    """Lower bound of the step time with this change; None if unknown, or if steps do not change."""
    most_gain_pct: float | None = None
    """Upper bound of the saving in % of an epoch, including the time to its first batch; in % of the run if validation
    or checkpoints limit the run. Remedies are sorted by this figure."""
    tried: str = ""
    """Step times in trials, with the present setting and with the new setting; empty if the change was not tried."""
    changes: str = ""
    """The change in a fixed form: ``num_workers=8``."""
    effects: tuple[Effect, ...] = ()
    """Other effects of the change."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The limit of training, the evidence for it, and the remedies."""

    bottleneck: Bottleneck
    """``data``, ``copy``, ``framework`` (between the steps), ``compute`` (the GPU is fed) or ``unknown``;
    ``validation`` or ``checkpoints`` if they take longer than training."""
    cause: Cause = "unknown"
    """The cause, if known: see :data:`Cause`."""
    grade: Grade
    """Degree of starvation, by the share of time spent waiting for data, for any bottleneck: OK below 5 %, slightly
    below 10 %, moderately below 20 %, else highly data-bound."""
    confidence: Confidence
    """Confidence in the verdict."""
    evidence: tuple[str, ...]
    """The figures behind the verdict, one sentence each."""
    remedies: tuple[Remedy, ...] = ()
    """At most three changes that save time, the largest possible gain first."""
    notes: tuple[str, ...] = ()
    """Further facts, and things to try without a known gain, one sentence each."""
    why_not: tuple[str, ...] = ()
    """Obvious changes that would not help, with the reason, one sentence each."""
    measurements: Measurements
    """All that was measured."""

    page: ClassVar[Callable[["Diagnosis"], str] | None] = None
    """Function that makes the page for a notebook; set when the module ``report.files`` is imported."""

    def __repr__(self) -> str:
        return f"<Diagnosis: {self.bottleneck}, {self.cause}; {self.grade}>"

    def _repr_html_(self) -> str | None:
        """The page for a notebook; None if the module ``report.files`` was not imported."""
        make = type(self).page
        return None if make is None else make(self)

    @property
    def stats(self) -> StarvationStats:
        """The parts of the steps."""
        return self.measurements.stats

    @property
    def device_type(self) -> str:
        """Type of the device on which the steps ran: ``cpu``, ``cuda``, ..."""
        return self.measurements.facts.device_type
