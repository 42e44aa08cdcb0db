"""The words of a verdict: a sentence for each kind of note, and for the shares of a run."""

import math
import string
from collections.abc import Callable
from typing import Any

from lightning_feed.measure.measurements import Measurements
from lightning_feed.verdict.diagnosis import Note, NoteKind
from lightning_feed.verdict.shares import is_toy_step
from lightning_feed.verdict.thresholds import LEAST_GAIN_PCT
from lightning_feed.wording import in_rate, plural, rate_unit, size_text

DIAGNOSE = "lightning-feed diagnose your_script.py -- ARGUMENTS"
"""The command that diagnoses a program that is not known."""
UNKNOWN = "?"
_SHORT_STEP_MS = 10.0
"""Times of steps below this have two decimals."""
LOOP_WORDS = {"fit": "training", "validate": "validation", "test": "test", "predict": "prediction"}
"""Stage -> the word for its loop."""
_SYNCS = {
    "prog_bar": "metrics in the progress bar are read from the device",
    "grad_scaler": "the GradScaler of precision 16-mixed reads back whether gradients overflowed",
    "sigterm_broadcast": "with several ranks Lightning broadcasts in each step whether SIGTERM came",
    "throughput_monitor": "ThroughputMonitor synchronises to measure",
}
"""Synchronisation of Lightning -> the reason of the wait."""
_WAYS_OUT = {
    "prog_bar": "self.log(..., prog_bar=False) avoids it",
    "grad_scaler": 'precision="bf16-mixed" needs no scaler',
    "sigterm_broadcast": "there is no switch for it",
    "throughput_monitor": "remove that callback once you have its figures",
}
"""Synchronisation of Lightning -> how to avoid it."""
TRIES = {
    "lines": "finds the lines of your code that take the time",
    "lighter samples": "tries ways with less work for each sample",
}
"""Experiment of a diagnosis -> its words."""
_PARTS = {"framework": "between the steps", "copy": "in the transfer to the device", "data": "waiting for data"}
_PAGEABLE = "batches are in pageable memory, so the host has to wait while they are copied"


def in_ms(value: float | None, step_ms: float) -> str:
    """Return the milliseconds as text, with two decimals for short steps."""
    if value is None:
        return UNKNOWN
    decimals = 1 if step_ms >= _SHORT_STEP_MS else 2
    return f"{value:.{decimals}f}"


def toy_sentence(step_ms: float | None) -> str | None:
    """Return the one sentence about steps so short that Python dominates them; None for longer steps."""
    if not is_toy_step(step_ms):
        return None
    return f"Steps of {step_ms:.1f} ms: Python overhead dominates; use larger batches."


def words(note: Note, measured: Measurements, *, diagnose: str = DIAGNOSE) -> str:
    """Return the sentence of a note, without a full stop.

    Args:
        note: the note.
        measured: the measurements of the verdict, for the unit of rates and for the precision of times.
        diagnose: the command that diagnoses the program.
    """
    stats = measured.stats
    if note.in_validation and measured.validation is not None:
        stats = measured.validation.stats
    form = WORDS[note.kind]
    text = form(_Values(note), measured) if callable(form) else form
    values = {**note.figures, **note.names, "diagnose": f"`{diagnose}`"}
    text = _Formatter(stats.step_ms or 0.0, measured.experiments.batch_size).vformat(text, (), values)
    if note.in_validation:
        return f"in validation: {text}"
    return text


class _Formatter(string.Formatter):
    """Formats ``{x:ms}`` as milliseconds, ``{x:rate}`` as a rate of samples and ``{x:size}`` as bytes, and others as
    usual. A value that is not known, as in a file that was written by hand, is shown as ``?``."""

    def __init__(self, step_ms: float, batch_size: int | None) -> None:
        self._step_ms = step_ms
        self._batch_size = batch_size

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        """Return the value with a name; None if it is missing."""
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format one value of a sentence."""
        if not _is_known(value):
            return UNKNOWN
        if isinstance(value, str):  # a name, also where a file that was changed by hand has it for a figure
            return value
        if format_spec == "ms":
            return in_ms(value, self._step_ms)
        if format_spec == "rate":
            return in_rate(value * (self._batch_size or 1))
        if format_spec == "size":
            return size_text(int(value))
        if not format_spec and isinstance(value, float) and value.is_integer():  # as read from JSON
            return str(int(value))
        return str(super().format_field(value, format_spec))


def _is_known(value: object) -> bool:
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


class _Values:
    """The values of a note, for the sentences that depend on which of them are known."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def has(self, name: str) -> bool:
        """Return True if a figure or a name is known."""
        return self._note.figures.get(name) is not None or bool(self._note.names.get(name))

    def if_known(self, name: str, form: str, otherwise: str = "") -> str:
        """Return ``form`` if a figure or a name is known, else ``otherwise``."""
        return form if self.has(name) else otherwise

    def figure(self, name: str) -> float:
        """Return a figure that is known, or 0."""
        figure = self._note.figures.get(name) or 0.0
        return figure if math.isfinite(figure) else 0.0

    def word(self, name: str, table: dict[str, str]) -> str:
        """Return the words in a table for a name; unknown for any other name, which must not become a form itself."""
        return table.get(self._note.names.get(name, ""), UNKNOWN)


# --- sentences that depend on what is known -----------------------------------------------------------------------
# They return a form for the other values.


def _part_of_the_step(values: _Values, _: Measurements) -> str:
    text = f"{{ms:ms}} of {{step_ms:ms}} ms ({{pct:.0f}} %) {values.word('part', _PARTS)}"
    if values.figure("by_ranks"):
        return f"{text}, the slowest rank of each step"
    return text


def _device_wait(values: _Values, _: Measurements) -> str:
    text = "{at} waits for the GPU in each step" + values.if_known("code", " (`{code}`)")
    if not values.has("cost_pct"):
        return text
    costs = "up to {cost_pct:.0f} % of a step" if values.figure("cost_pct") else "nothing"
    return f"{text}, which costs {costs}: the GPU is busy {{busy_pct:.0f}} % of the step itself"


def _loading_here(values: _Values, _: Measurements) -> str:
    text = values.if_known(
        "generator", "{generator} takes {ms:ms} ms in the training process", "loading takes {ms:ms} ms"
    )
    text += ", {cpu_ms:ms} of them on a CPU"
    return text + values.if_known("queue_ms", " and {queue_ms:ms} waiting for one")


def _read_from_storage(values: _Values, _: Measurements) -> str:
    return "{pct:.0f} % of the bytes come from storage" + values.if_known("mb_per_s", ", {mb_per_s:.1f} MB/s")


def _not_storage(values: _Values, _: Measurements) -> str:
    cached = values.if_known("pct", ": {pct:.0f} % of the bytes come from the page cache")
    return f"workers do not wait for storage{cached}"


def _workers(values: _Values, _: Measurements) -> str:
    text = f"the loader has {plural(int(values.figure('workers')), 'worker')}"
    if values.has("cpus"):
        text += f" on {plural(int(values.figure('cpus')), 'CPU')}"
    if values.figure("in_place"):
        text += ", with batches in place"
    if not all(map(values.has, ("on_cpu_pct", "queue_pct", "blocked_pct"))):
        return text
    return (
        f"{text}: on a CPU {{on_cpu_pct:.0f}} % of the time, waiting for one {{queue_pct:.0f}} %, "
        "blocked {blocked_pct:.0f} %"
    )


def _making(values: _Values, _: Measurements) -> str:
    making = values.word("stage", {"samples": "making its samples", "collate": "collating them"})
    most = values.if_known("function", ", most of it in {function} ({at})")
    return f"a batch takes {{ms:.1f}} ms in one process, {making} {{pct:.0f}} %{most}"


def _nothing_to_copy(values: _Values, _: Measurements) -> str:
    takes = values.if_known("hooks", "{hooks} takes", "transfer hooks take")
    return f"nothing is copied on the CPU: {takes} the time"


def _move_hooks(values: _Values, _: Measurements) -> str:
    hooks = values.if_known("hooks", "{hooks}", "your transfer hooks")
    return f"nothing is copied on a CPU, so this is {hooks}: move it to the dataset, and workers do it meanwhile"


def _slow_hook(values: _Values, *, way: str) -> str:
    at = values.if_known("at", " ({at})")
    return f"{{hook}}{at} takes {{ms:ms}} of {{step_ms:ms}} ms a step; {way}"


def _rarer_hook(values: _Values, _: Measurements) -> str:
    interval = values.if_known("interval", " ({interval}=50)")
    return _slow_hook(values, way=f"if it only observes, every 50th step is enough{interval}")


def _rarer_bar(values: _Values, _: Measurements) -> str:
    return _slow_hook(values, way="Trainer(enable_progress_bar=False) saves it")


def _rates(_: _Values, measured: Measurements) -> str:
    unit = rate_unit(measured.experiments.batch_size)
    return f"the loader alone gives {{batches_per_s:rate}} {unit} instead of {{own_batches_per_s:rate}}"


def _in_memory(values: _Values, measured: Measurements) -> str:
    return f"files are read from storage: with them in memory {_rates(values, measured)}"


def _slow_transforms(values: _Values, measured: Measurements) -> str:
    slowest = "make {transform} faster, which takes most of a sample's transforms ({ms:.1f} ms)"
    return f"{slowest}: without transforms {_rates(values, measured)}"


def _stored(values: _Values, what: str) -> str:
    text = f"{what} are stored in {{pack_bytes:size}} beside the {{folder_bytes:size}} of files"
    if not values.has("short_side_px"):
        return text
    return f"{text}, {{short_side_px}} pixels on the shorter side, so crops of small regions are less sharp"


def _threads_wait(values: _Values, measured: Measurements) -> str:
    text = "torch's threads wait for each other, and workers take their CPUs"
    if values.figure("workers") == sum(measured.facts.loader.every_num_workers):
        return text
    return f"{text}; tried with num_workers={{workers}}"


def share_text(measured: Measurements) -> str:
    """Return words such as ``validation takes 60 % of the run, and waits for data 80 % of its time``.

    Checkpoints are added if they take much time.
    """
    wall = measured.wall
    if wall is None or wall.run_s <= 0:
        return ""  # an older report
    validation_s = wall.seconds("validation")
    checkpoints_s = wall.seconds("checkpoints")
    shares = []
    if validation_s:
        share = f"validation takes {100 * validation_s / wall.run_s:.0f} % of the run"
        if measured.validation is not None:
            waited_pct = 100 * min(1.0, measured.validation.waited_s / validation_s)
            share += f", and waits for data {waited_pct:.0f} % of its time"
        shares.append(share)
    if checkpoints_s >= validation_s or 100 * checkpoints_s >= LEAST_GAIN_PCT * wall.run_s:
        shares.append(f"checkpoints take {100 * checkpoints_s / wall.run_s:.0f} % of the run")
    if checkpoints_s > validation_s:
        shares.reverse()
    return "; ".join(shares)


# --- all kinds of notes -------------------------------------------------------------------------------------------

WORDS: dict[NoteKind, str | Callable[[_Values, Measurements], str]] = {
    # the parts of a step, and of the run
    "part of the step": _part_of_the_step,
    "compute share": "{pct:.0f} % of each step is forward, backward and optimizer",
    "share of the run": lambda _, measured: share_text(measured),
    "hidden wait": "{hidden_ms:ms} of {ms:ms} ms in next(loader) are hidden: the device computes meanwhile",
    "waited in earlier epochs": (
        "in earlier epochs, which do not count here, a step waited {before_ms:ms} ms for data, and since then "
        "{since_ms:ms}"
    ),
    "slow epoch start": "the first batch of an epoch takes {s:.1f} s",
    "lost steps": "{steps} steps could not be measured on the device",
    "device wait": _device_wait,
    "others busy": "other programs take {pct:.0f} % of the CPUs: figures are of this moment",
    "waits and lacks a CPU": "training waits {pct:.0f} % of each step for data, and loading for a CPU",
    "too few steps": (
        "{steps} steps were measured, and a verdict needs {needed}: the first of an epoch and those after a "
        "validation do not count"
    ),
    "loader alone": "only the loader was measured: give a LightningModule, too, to see if training waits for it",
    "model disturbed": (
        "the model alone took {ms:ms} ms, more than the {step_ms:ms} ms of a step: something disturbed that "
        "experiment, so its result is ignored"
    ),
    # what makes training wait for data
    "first batch of an epoch": "{pct:.0f} % of an epoch of {steps} steps passes before its first batch ({s:.2f} s)",
    "slowest rank": "rank {rank} of {ranks} waits longest, and the others wait for it",
    "loading here": _loading_here,
    "thread blocked": "the training thread is blocked for the rest",
    "workers unknown": "it is not known what the workers do meanwhile",
    "workers lack CPUs": "workers wait for a CPU {pct:.0f} % of their time",
    "other threads have the CPUs": "workers do not outnumber the CPUs: other threads take them",
    "quota used up": "the CPU quota is used up in {pct:.0f} % of the scheduler's periods",
    "CPU pressure": "some task waits for a CPU {pct:.0f} % of the time",
    "ready without a CPU": (
        "the training thread waits {queue_ms:ms} of {ms:ms} ms for a CPU, to take a batch that is ready"
    ),
    "waits for pinning": "finished batches wait {ms:.1f} ms for the thread that pins them",
    "later batch ready": "a later batch was ready in {pct:.0f} % of the waiting",
    "handing over": ("batches were ready in {pct:.0f} % of the waiting: handing one over takes most of {ms:.1f} ms"),
    "queue mostly ready": "{ready:.1f} of {capacity:.0f} batches are ready on average, but sometimes none is",
    "faster from memory": "with its files in memory, the loader is {gain:.1f} x as fast",
    "no faster from memory": "with its files in memory, the loader is no faster",
    "read from storage": _read_from_storage,
    "mapped reads": "storage delivers {mb_per_s:.1f} MB/s through memory-mapped reads",
    "storage unknown": "it is unknown if workers wait for storage",
    "storage pressure": "some task waits for storage {pct:.0f} % of the time",
    "not storage": _not_storage,
    "sample cost": "a sample takes {ms:.2f} ms, {pct:.0f} % of it on a CPU",
    "ceiling reached": "samples that cost nothing load no faster: collating and sending batches is the limit",
    "device decodes": "the GPU decodes in this time, too",
    "workers": _workers,
    "takes turns": lambda values, _: f"num_workers=0, so loading and {values.word('stage', LOOP_WORDS)} take turns",
    "making a batch": _making,
    # the other parts of a step
    "slow hook": "{hook} takes {ms:ms} ms a step",
    "waits for the device": lambda values, _: (
        f"the host waits for the device in each step: {values.word('sync', _SYNCS)}"
    ),
    "nothing to copy": _nothing_to_copy,
    "normalised here": "nothing is copied on the CPU: ImageFolderDataModule normalises the images here",
    "pageable": "batches are in pageable memory",
    "not locked": "batches are in place, but the driver has not locked their memory",
    "pinning failed": (
        "pin_memory=True has left the batches in pageable memory: their class needs a method pin_memory()"
    ),
    "small tensors": "a batch has {tensors} tensors of {kib:.1f} kB",
    "compute stream": "batches are copied on the stream that computes",
    "slow link": "batches are copied ahead, and still {gb_per_s:.1f} GB/s are not enough",
    "pinning unknown": "it is not known if batches are pinned",
    "model alone": (
        "the model alone takes {ms:ms} ms a step with one batch repeated: faster loading would not help here"
    ),
    "device idle": "the GPU is idle {pct:.0f} % of the step itself",
    "launching": "the training thread computes {ms:ms} ms a step to launch the work of the device",
    "thread idle": "the training thread is not busy meanwhile",
    "not the model": (
        "the model alone takes {ms:ms} of the {compute_ms:ms} ms of the step itself: other programs take its CPUs, or "
        "the step does more than the model"
    ),
    # things to try, and to know
    "left out of the fit": "{parts}: not run here, and the rest waits little",
    "epoch cut short": (
        "the loader ended after {batches} of {length} batches, so Lightning ran no validation: its dataset raised "
        "StopIteration, or the length of its sampler is wrong"
    ),
    "short steps": "a step of {ms:ms} ms is short: larger batches may gain more than any other setting",
    "search ran out of time": "the search for workers ran out of time, so another number may be faster still",
    "no workers allowed": "no workers, though they would load while the model trains: {why}",
    "may repeat samples": (
        "the dataset is an IterableDataset that may not divide its samples among workers, so no number of workers is "
        "advised: with num_workers=2 every sample could come twice. If yours divides them, set num_workers yourself"
    ),
    "diagnose": lambda values, _: f"{{diagnose}} {values.word('tries', TRIES)}",
    "diagnose whole images": (
        "your ImageFolder decodes each image whole and then crops it: {diagnose} times decoding only the crops"
    ),
    "diagnose cold reads": "files are read from storage: {diagnose} times the loader with its files in memory",
    "in memory": _in_memory,
    "DALI decodes": 'the workers wait, and DALI decodes what they read: compare with backend="torch"',
    "slow rank": "rank {rank} alone is slow: compare the nodes' disks and CPUs",
    "deeper queue": (
        "the loader is fast enough on average. More prefetched batches may cover the slow ones: try "
        "prefetch_factor={prefetch_factor}"
    ),
    "pin thread": (
        "one thread pins all batches and cannot keep up: send fewer bytes, such as uint8 images for device_transform"
    ),
    "many tensors": (
        "a batch has {tensors} tensors, and each is sent separately: fewer, larger tensors are faster to send"
    ),
    "slow transforms": _slow_transforms,
    "profile hooks": 'Trainer(profiler="simple") names the callback or hook that takes the time between the steps',
    "rarer hook": _rarer_hook,
    "rarer bar": _rarer_bar,
    "avoid waits": lambda values, _: f"{values.word('sync', _SYNCS)}: {values.word('sync', _WAYS_OUT)}",
    "move hooks": _move_hooks,
    "pin": f"{_PAGEABLE}: try pin_memory=True",
    "lock memory": f"{_PAGEABLE}: allow more locked memory (`ulimit -l`), or use smaller batches",
    "pin method": f"{_PAGEABLE}: give their class a method pin_memory(), or use dicts and lists of tensors",
    "combine tensors": "each of the many small tensors is copied separately: combine them into one tensor in collate",
    "launch less": (
        'the loader is not the limit: torch.compile(model, mode="reduce-overhead") launches many operations at once, '
        "as CUDA graphs do, and larger batches launch fewer for each sample"
    ),
    "rarer wait": "{at}: read the value in every 50th step, or keep it on the GPU with .detach()",
    "profile the step": (
        'the GPU waits for something else that the step does on the host: Trainer(profiler="advanced") names the '
        "function"
    ),
    # what was tried in vain
    "more workers in vain": "more workers: {ms:ms} ms a step at best in trials, and {own_ms:ms} ms with yours",
    "taken back": (
        "num_workers={workers}, which trials found faster: training itself took {ms:ms} ms a step with it, and "
        "{own_ms:ms} as it is"
    ),
    "crops in vain": ("decoding only the crops: {whole_ms:.2f} -> {crop_ms:.2f} ms of CPU for a sample, no clear gain"),
    # why a change helps
    "more at once": "more workers make more batches at once",
    "beside training": "batches are made while the model trains",
    "compete for CPUs": "the workers compete for CPUs",
    "sending is slow": "making a batch is faster than sending it from a worker",
    "threads wait": _threads_wait,
    "starts again": "saves {s:.2f} s an epoch, in which workers start again",
    "slow batch overtaken": "finished batches do not wait for a slow one",
    "copied once": "the files are copied once, if they fit",
    "only crops": (
        "put in your transform. Only the crop of an image is decoded: {crop_ms:.1f} ms of CPU instead of {whole_ms:.1f}"
    ),
    "less CPU": "{then_ms:.2f} ms of CPU for a sample instead of {now_ms:.2f}",
    "fastest decoder": "this takes the fastest accurate one, here {decoder}",
    "GPU decodes": "the GPU decodes",
    "no antialiasing": "images are resized without antialiasing",
    "pixels stored": lambda values, _: _stored(values, "pixels"),
    "images stored": lambda values, _: _stored(values, "images"),
    "in place": "workers leave batches where training reads them: nothing copies or pins them on the way",
    "copies wait": "the host waits for copies from pageable memory",
    "copied ahead": "copies the next batch while this one computes",
    "bar drawn": "drawing it takes {ms:.2f} ms a step",
    "logger called": "{hook} takes {ms:.2f} ms a step",
    "validation rarer": (
        "validation runs {times:.3g} times less often, and so do early stopping, the choice of the best checkpoint "
        "and schedulers that use a validation metric"
    ),
    "checkpoint cost": "each of {times} checkpoints took {s:.2f} s",
}
"""Kind of note -> its sentence, or a function that makes one for what is known."""
