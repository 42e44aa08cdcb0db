"""Diagnosis and Remedy: the output of a verdict, as frozen values."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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


Form = Literal[
    "arguments", "settings", "datamodule", "replacement", "override", "trainer", "callback", "command", "statement"
]
"""The kind of text in a remedy's ``code``, so that programs can apply it, too.

``arguments``: keyword arguments for the call that makes the training loader. They replace present values.
``settings``: arguments for LoaderSettings, which a FastDataModule takes as ``loader=`` and ``FastDataModule.wrap`` as
its second argument. ``datamodule``: arguments for the call that makes the data module. ``trainer``: arguments for the
Trainer. ``override``: text for the command line of LightningCLI. ``callback``: a callback to add to the Trainer's
callbacks; if a callback of its class is present, the present callback gets these arguments. ``replacement``: a data
module for ``trainer.fit`` in place of the training loader, with ``...`` for parts that the user has to fill in.
``command``: a shell command to run once; ``where`` has the change to make afterwards. ``statement``: a line for the
start of the program.
"""


Effect = Literal["random numbers", "copies of the dataset", "order", "pixels", "memory", "sums"]
"""Effect of a change besides saving time.

``random numbers``: those drawn in workers differ, as they do with torch if the number of workers changes.
``copies of the dataset``: workers keep theirs from epoch to epoch, so they do not see what the program changes in it.
``order``: of batches, which becomes random. ``pixels``: they differ by a level or two. ``memory``: more of it is used.
``sums``: of floating-point numbers, which are added in another order.
"""


NoteKind = Literal[
    # the parts of a step, and of the run
    "part of the step", "compute share", "share of the run", "hidden wait", "waited in earlier epochs",
    "slow epoch start", "lost steps", "device wait", "others busy", "waits and lacks a CPU", "too few steps",
    "loader alone", "model disturbed",
    # what makes training wait for data
    "first batch of an epoch", "slowest rank", "loading here", "thread blocked", "workers unknown",
    "workers lack CPUs", "other threads have the CPUs", "quota used up", "CPU pressure", "ready without a CPU",
    "waits for pinning", "later batch ready", "handing over", "queue mostly ready", "faster from memory",
    "no faster from memory", "read from storage", "mapped reads", "storage unknown", "storage pressure",
    "not storage", "sample cost", "ceiling reached", "device decodes", "workers", "takes turns", "making a batch",
    # the other parts of a step
    "slow hook", "waits for the device", "nothing to copy", "normalised here", "pageable", "not locked",
    "pinning failed", "small tensors", "compute stream", "slow link", "pinning unknown", "model alone",
    "device idle", "launching", "thread idle", "not the model",
    # things to try, and to know
    "left out of the fit", "epoch cut short", "short steps", "search ran out of time", "no workers allowed",
    "may repeat samples", "diagnose", "diagnose whole images", "diagnose cold reads", "in memory", "DALI decodes",
    "slow rank", "deeper queue", "pin thread", "many tensors", "slow transforms", "profile hooks", "rarer hook",
    "rarer bar", "avoid waits", "move hooks", "pin", "lock memory", "pin method", "combine tensors", "launch less",
    "rarer wait", "profile the step",
    # what was tried in vain
    "more workers in vain", "taken back", "crops in vain",
    # why a change helps
    "more at once", "beside training", "compete for CPUs", "sending is slow", "threads wait", "starts again",
    "slow batch overtaken", "copied once", "only crops", "less CPU", "fastest decoder", "GPU decodes",
    "no antialiasing", "pixels stored", "images stored", "in place", "copies wait", "copied ahead", "bar drawn",
    "logger called", "validation rarer", "checkpoint cost",
]  # fmt: skip
"""The kind of a statement. The module ``report.words`` has the words for each."""


@dataclass(frozen=True)
class Note:
    """One statement of a verdict, with its figures. Only the report turns it into a sentence."""

    kind: NoteKind
    """The kind, which says what the figures are."""
    figures: dict[str, float | None] = field(default_factory=dict)
    """Figures by name. Units are those of the name: ``ms``, ``pct``, ``s``; None if unknown."""
    names: dict[str, str] = field(default_factory=dict)
    """Names by their role, such as the line of code that is meant; empty if unknown."""
    in_validation: bool = False
    """True for a statement on validation in the verdict on a whole run."""

    @classmethod
    def of(cls, kind: NoteKind, **values: float | str | None) -> "Note":
        """Make a note from figures and names."""
        figures: dict[str, float | None] = {}
        names: dict[str, str] = {}
        for name, value in values.items():
            if isinstance(value, str):
                names[name] = value
            else:
                figures[name] = None if value is None else float(value)
        return cls(kind, figures, names)

    def of_validation(self) -> "Note":
        """Return the same statement, on validation."""
        return replace(self, in_validation=True)


@dataclass(frozen=True)
class Change:
    """The new value of a setting."""

    setting: str
    """Name of the setting: ``num_workers``."""
    value: str
    """The new value, as Python writes it: ``8``."""

    def __str__(self) -> str:
        return f"{self.setting}={self.value}"


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
    why: tuple[Note, ...]
    """The reasons why the change helps."""
    least_step_ms: float | None = None
    """Lower bound of the step time with this change; None if unknown, or if steps do not change."""
    most_gain_pct: float | None = None
    """Upper bound of the saving in % of an epoch, including the time to its first batch; in % of the run if validation
    or checkpoints limit the run. Remedies are sorted by this figure."""
    tried_ms: tuple[float, float] | None = None
    """Step times in trials, with the present setting and with the new setting; None if the change was not tried."""
    change: Change | None = None
    """The setting that is changed; None for remedies that change none."""
    effects: tuple[Effect, ...] = ()
    """Other effects of the change."""

    def sets(self, setting: str) -> bool:
        """Return True if the remedy changes this setting."""
        return self.change is not None and self.change.setting == setting


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
    evidence: tuple[Note, ...]
    """The figures behind the verdict."""
    remedies: tuple[Remedy, ...] = ()
    """At most three changes that save time, the largest possible gain first."""
    notes: tuple[Note, ...] = ()
    """Further facts, and things to try without a known gain."""
    why_not: tuple[Note, ...] = ()
    """Obvious changes that would not help, with the reason."""
    measurements: Measurements
    """All that was measured."""

    page: ClassVar[Callable[["Diagnosis"], str] | None] = None
    """Function that makes the page for a notebook; set when the module ``report.files`` is imported."""

    def __repr__(self) -> str:
        return f"<Diagnosis: {self.bottleneck}, {self.cause}; {self.grade}>"

    def _repr_html_(self) -> str | None:
        """Return the page for a notebook; None if the module ``report.files`` was not imported."""
        make = type(self).page
        return make and make(self)

    @property
    def stats(self) -> StarvationStats:
        """The parts of the steps."""
        return self.measurements.stats

    @property
    def device_type(self) -> str:
        """Type of the device on which the steps ran: ``cpu``, ``cuda``, ..."""
        return self.measurements.facts.device_type
