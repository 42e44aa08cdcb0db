"""The last line of a report: the one step to take next, or the statement that there is nothing to gain."""

import shlex
from dataclasses import dataclass, replace

from lightning_feed.measure.stats import MIN_STEPS
from lightning_feed.measure.wall import Part
from lightning_feed.report.report import NOTEBOOK, RunIdentity, is_toy, should_try_workers, takes_turns
from lightning_feed.report.words import LOOP_WORDS, TRIES, in_ms, words
from lightning_feed.trials.time_left import LEAST_S
from lightning_feed.verdict.diagnosis import Diagnosis, Note, NoteKind, Remedy
from lightning_feed.verdict.lighter_samples import may_try_lighter_samples
from lightning_feed.verdict.notes import MADE_IN_YOUR_CODE
from lightning_feed.verdict.remedies import IN_PLACE, MADE_ON_CPU, may_be_tuned
from lightning_feed.verdict.shares import workers_fill_cpus
from lightning_feed.wording import source_line

ENOUGH_STEPS = 30
"""Number of steps that are enough for a verdict, including the warm-up."""
ARGUMENTS = "ARGUMENTS"
"""Placeholder for arguments that are not known."""
_ASKING: tuple[NoteKind, ...] = ("diagnose", "diagnose whole images", "diagnose cold reads")
"""Notes that ask for a diagnosis."""
_TUNE = "train with LIGHTNING_FEED=tune, or with `AutotuneCallback()`"


def next_step(diagnosis: Diagnosis, run: RunIdentity | None = None, *, arguments: str = ARGUMENTS) -> str:
    """Return the best fix and where to make it, or else a command that measures more, or else that there is nothing to
    gain.

    Args:
        diagnosis: the verdict.
        run: the run that the verdict is about; None if unknown.
        arguments: the program's arguments as typed in a shell. Not used if the program was started without arguments.
    """
    return _adviser(diagnosis, run, arguments).step().text


def other_notes(diagnosis: Diagnosis, run: RunIdentity | None = None, *, arguments: str = ARGUMENTS) -> list[str]:
    """Return the notes that :func:`next_step` does not repeat, with the program's name in commands.

    The arguments are those of :func:`next_step`.
    """
    adviser = _adviser(diagnosis, run, arguments)
    said = adviser.step().note
    return [
        adviser.words(note)
        for note in diagnosis.notes
        if note != said and note.kind != "left out of the fit" and not (said == _DIAGNOSIS and note.kind == "diagnose")
    ]


_WITHOUT_NOTE: dict[str, str] = {
    "framework": '`Trainer(profiler="simple")` names the callback or hook that takes the time between the steps',
    "copy": "send fewer bytes: a smaller dtype, such as uint8 images, or smaller batches",
    "validation": "validate less often: `Trainer(check_val_every_n_epoch=...)`, or on less: `limit_val_batches=...`",
    "checkpoints": "save less often: `ModelCheckpoint(every_n_train_steps=...)`",
}
"""Bottleneck -> the next step if the verdict has no note on this bottleneck."""
_NORMALISED = "nothing: on a CPU, ImageFolderDataModule normalises images in the training process"


def _adviser(diagnosis: Diagnosis, run: RunIdentity | None, arguments: str) -> "_Adviser":
    run = run or RunIdentity()
    return _Adviser(diagnosis, _Program(run.program, arguments if run.has_arguments else ""))


@dataclass(frozen=True)
class _Program:
    """The program that trained, for commands that run it again."""

    name: str
    """The program, as in :attr:`RunIdentity.program`; empty if not known."""
    arguments: str
    """The program's arguments as typed in a shell."""

    @property
    def is_notebook(self) -> bool:
        return self.name == NOTEBOOK

    @property
    def quoted(self) -> str:
        """The program as typed in a shell."""
        if self.name.startswith("-m "):
            return self.name
        return shlex.quote(self.name or "SCRIPT.py")

    @property
    def passed(self) -> str:
        """The arguments, as they are passed on behind ``--``; empty if there are none."""
        return f" -- {self.arguments}" if self.arguments else ""

    @property
    def typed(self) -> str:
        """The command that runs the program."""
        is_executable = self.name and not self.name.startswith("-m ") and not self.name.endswith(".py")
        words = [] if is_executable else ["python"]
        words.append(self.quoted)
        if self.arguments:
            words.append(self.arguments)
        return " ".join(words)

    def train_measured(self, *, measures: bool) -> str:
        """Return the way to train with a GPUStarvationCallback, which the program itself has if it ``measures``."""
        if self.is_notebook:
            return "`GPUStarvationCallback()`"
        if measures:
            return f"`{self.typed}`"
        return f"`LIGHTNING_FEED=1 {self.typed}`"


@dataclass(frozen=True)
class _Step:
    """The next step."""

    text: str
    note: Note | None = None
    """The note that the step repeats; None if it repeats none."""


_DIAGNOSIS = Note.of("diagnose")
"""The note on any step that is a diagnosis."""


class _Adviser:
    """Chooses the next step for a verdict on a program."""

    def __init__(self, diagnosis: Diagnosis, program: _Program) -> None:
        self.diagnosis = diagnosis
        self.program = program
        self.measured = diagnosis.measurements
        self.facts = diagnosis.measurements.facts

    def step(self) -> _Step:
        """Return the next step."""
        return self._to_mend_first() or self._to_try() or self._to_gain()

    def _to_mend_first(self) -> _Step | None:
        """Return the step for a run whose fault matters more than its speed, or that has no verdict; else None."""
        if self.facts.loader.repeated:
            return _Step(
                "divide the stream in its `__iter__` by `torch.utils.data.get_worker_info()`, or use one worker"
            )
        if is_toy(self.diagnosis):
            return _Step("use larger batches: no other setting makes steps this short faster")
        if self.diagnosis.bottleneck == "unknown":
            return self._to_a_verdict()
        return None

    def _to_try(self) -> _Step | None:
        """Return the command that tries lighter samples, or numbers of workers; None if these are no remedy, or were
        tried.

        A fix that was tried already comes before trials of numbers of workers.
        """
        if self._should_try_lighter_samples():
            return self._fewer_threads() or self._diagnose(TRIES["lighter samples"])
        if not should_try_workers(self.diagnosis) or not may_be_tuned(self.facts):
            return None
        tried = [remedy for remedy in self.diagnosis.remedies if remedy.tried_ms is not None]
        if tried:
            return _Step(_fix(tried[0]))
        return _Step(self._tune("tries numbers of workers if samples stay the same, and takes the fastest"))

    def _to_gain(self) -> _Step:
        """Return the first fix; else what can be said of the bottleneck."""
        diagnosis = self.diagnosis
        if diagnosis.remedies:
            return _Step(self._in_place() or _fix(diagnosis.remedies[0]))
        if self._rest_may_limit():
            return _Step(self._measure_the_rest())
        if diagnosis.cause == "transfer hooks" and self.facts.datamodule.normalizes:
            return self._first_note(_NORMALISED)
        if diagnosis.bottleneck == "data":
            return self._for_data()
        if diagnosis.bottleneck == "compute":
            return self._for_compute()
        return self._first_note(_WITHOUT_NOTE[diagnosis.bottleneck])

    def _should_try_lighter_samples(self) -> bool:
        """Return True for a fit whose workers take all CPUs, while other settings may make its samples with less
        work."""
        return self._cpus_are_busy() and may_try_lighter_samples(self.measured)

    def _cpus_are_busy(self) -> bool:
        """Return True if making batches on the CPU is the bottleneck, and workers take all CPUs already."""
        is_made_on_cpu = self.diagnosis.bottleneck == "data" and self.diagnosis.cause in MADE_ON_CPU
        return is_made_on_cpu and workers_fill_cpus(self.measured)

    def words(self, note: Note) -> str:
        """Return the sentence of a note, with the command for this program."""
        return words(note, self.measured, diagnose=self._command())

    def _repeat(self, note: Note) -> _Step:
        return _Step(self.words(note), note)

    def _notes(self) -> list[Note]:
        """Return the notes with advice: all except the note on the time that validation and checkpoints take."""
        return [note for note in self.diagnosis.notes if note.kind != "share of the run"]

    def _first_note(self, otherwise: str) -> _Step:
        return next(map(self._repeat, self._notes()), _Step(otherwise))

    def _rest_may_limit(self) -> bool:
        """Return True for a diagnosis that hardly waited for data, and did not run parts of the fit, which may be to
        blame."""
        return any(note.kind == "left out of the fit" for note in self.diagnosis.notes)

    def _measure_the_rest(self) -> str:
        left_out = self.measured.experiments.stripped
        training = self.program.train_measured(measures=bool(self.facts.trainer.measures))
        return f"nothing in loading; {training} measures what was left out here ({left_out})"

    def _in_place(self) -> str:
        """Return the command that tries batches in place, if these are the first fix and can be tried; else empty."""
        if self.diagnosis.remedies[0].change != IN_PLACE or not may_be_tuned(self.facts) or self._is_short():
            return ""  # outside of training, batches are handed over as torch does it
        return self._tune("hands batches over in place, tries numbers of workers, and takes the fastest")

    def _tune(self, what: str) -> str:
        """Return the advice to try the loader's settings: in training, or outside of it if training is too short."""
        if self.program.is_notebook or not self.program.name:
            return f"{_TUNE}: it {what}"
        if self._is_short():
            command = f"{self._few_threads()}lightning-feed tune {self.program.quoted}{self.program.passed}"
            return f"`{command}` tries numbers of workers outside of this short run"
        return f"`{self._few_threads()}LIGHTNING_FEED=tune {self.program.typed}` {what}"

    def _is_short(self) -> bool:
        """Return True if the whole run is too short for trials to save the time that they take."""
        wall = self.measured.wall
        left_s = self.facts.trainer.left_s
        return wall is not None and left_s is not None and wall.run_s + left_s < LEAST_S

    def _to_a_verdict(self) -> _Step:
        results = self.measured.experiments
        own = results.tried_as("own")
        chosen = results.tried_as("chosen")
        if own is not None and chosen is not None and chosen is not own:
            figures = f"{in_ms(own.step_ms, own.step_ms)} -> {in_ms(chosen.step_ms, own.step_ms)} ms a step"
            return _Step(f"num_workers={chosen.num_workers}: in trials, {figures}")
        if self.measured.stats.steps >= MIN_STEPS:
            return self._fewer_threads() or self._diagnose("measures each part alone")
        if not self.measured.stats.steps and results.loader_per_s:
            return _Step("diagnose a program that trains, or call diagnose() with a LightningModule")
        return _Step(f"train for {ENOUGH_STEPS} steps or more")

    # --- waiting for data ---------------------------------------------------------------------------------------------

    def _for_data(self) -> _Step:
        fewer_threads = self._fewer_threads()
        if fewer_threads:
            return fewer_threads
        if not takes_turns(self.diagnosis):
            return self._faster_loading()
        turns = f"loading and {LOOP_WORDS[self.facts.stage]} take turns"
        if self._workers_in_vain():
            turns += ", and workers would gain nothing"
        faster = self._faster_loading()
        return replace(faster, text=f"{turns}; {faster.text}")

    def _faster_loading(self) -> _Step:
        results = self.measured.experiments
        if results.functions:
            slowest = results.functions[0]
            line = source_line(slowest.file, slowest.line)
            takes = f"it takes {slowest.ms_per_batch:.1f} ms a batch"
            return _Step(f"make {slowest.name} faster, most of all {line}: {takes}")
        notes = self._notes()
        if not self.measured.diagnosed and (self.diagnosis.cause in MADE_IN_YOUR_CODE or not notes):
            asking = [note for note in notes if note.kind in _ASKING]
            if not asking:
                return self._ask_more()
            return self._repeat(asking[0])
        if notes:
            return self._repeat(notes[0])
        part = ""
        if results.costs:
            largest = max(results.costs, key=lambda cost: cost.cpu_ms)
            part = f", above all in {largest.name} ({largest.cpu_ms:.1f} ms of CPU for a sample)"
        return _Step(f"make a batch with less work{part}: no loader setting is known to help")

    def _workers_in_vain(self) -> bool:
        """Return True if more workers were tried, and gained nothing."""
        return any(reason.kind == "more workers in vain" for reason in self.diagnosis.why_not)

    def _ask_more(self) -> _Step:
        if self.diagnosis.cause == "hand-over":
            return _Step(self._for_hand_over())
        if self.facts.loop == "trainer" and self.facts.stage == "fit":
            return self._diagnose(TRIES["lines"])
        if (takes_turns(self.diagnosis) and self._workers_in_vain()) or self._cpus_are_busy():
            return _Step("make a batch with less work")
        return _Step("`lightning_feed.tune(loader)` tries other settings of this loader")

    def _for_hand_over(self) -> str:
        if self.diagnosis.grade == "slightly data-bound":
            return "nothing: batches are ready in time, and only handing them over takes time"
        if may_be_tuned(self.facts) and not self.facts.trainer.tuned:
            return f"{_TUNE}: it tries other numbers of workers"
        stats = self.measured.stats
        takes = f"handing one over takes {in_ms(stats.data_ms, stats.step_ms or 0.0)} ms"
        return f"batches are ready in time, and {takes}: fewer or smaller tensors take less"

    # --- the step itself ----------------------------------------------------------------------------------------------

    def _for_compute(self) -> _Step:
        cause = self.diagnosis.cause
        fewer_threads = self._fewer_threads()
        if fewer_threads:
            return _Step(f"the loader keeps up; {fewer_threads.text}")
        if cause in ("oversubscribed", "unknown"):  # the model alone is faster, or the GPU is idle within the step
            return self._first_note(_WITHOUT_NOTE["framework"])
        notes = self._notes()
        if cause in ("launch", "synchronisation") and notes:
            return self._repeat(notes[0])
        wall = self.measured.wall
        if wall is not None and len(notes) < len(self.diagnosis.notes):
            parts: tuple[Part, Part] = ("validation", "checkpoints")
            return _Step(f"the loader keeps up; {_WITHOUT_NOTE[max(parts, key=wall.seconds)]}")
        if self.measured.experiments.stripped:
            return _Step(self._measure_the_rest())
        return _Step("nothing, the loader keeps up")

    # --- commands -----------------------------------------------------------------------------------------------------

    def _diagnose(self, what: str) -> _Step:
        how = " in a cell, with what `trainer.fit` is given," if self.program.is_notebook else ""
        return _Step(f"`{self._command()}`{how} {what}", _DIAGNOSIS)

    def _command(self) -> str:
        """Return the command, or in a notebook the call, that diagnoses the same training."""
        if self.program.is_notebook:
            return "lightning_feed.diagnose(trainer, model)"
        return f"{self._few_threads()}lightning-feed diagnose {self.program.quoted}{self.program.passed}"

    def _few_threads(self) -> str:
        """Return the environment variable that keeps torch's threads as few as in this run, if other programs use the
        CPUs."""
        threads = self.facts.torch_threads
        if threads is None or not self._shares_cpus() or threads >= (self.facts.usable_cpus or 1):
            return ""
        return f"OMP_NUM_THREADS={threads} "

    def _fewer_threads(self) -> _Step | None:
        """Return the advice to use fewer threads, if torch uses more threads than other programs leave CPUs free; else
        None.

        On a CPU, torch's threads wait for each other at each operation, so all wait for the thread that lacks a CPU
        (``benchmarks/threads.py``).
        """
        if not self._shares_cpus():
            return None
        threads = self.facts.torch_threads or 1
        free_share = max(0.0, 1 - (self.facts.others_cpu_pct or 0.0) / 100)
        free_cpus = max(1, int((self.facts.usable_cpus or 1) * free_share))
        if threads <= free_cpus:
            return None
        fewer = f"OMP_NUM_THREADS={free_cpus} {self.program.typed}"
        if self.program.is_notebook:
            fewer = f"torch.set_num_threads({free_cpus})"
        elif not self.facts.trainer.measures:
            fewer = f"OMP_NUM_THREADS={free_cpus} LIGHTNING_FEED=1 {self.program.typed}"
        return _Step(f"try `{fewer}`, since torch's {threads} threads wait for each other")

    def _shares_cpus(self) -> bool:
        """Return True if the model runs on CPUs that other programs use, too."""
        return self.facts.crowded and self.facts.device_type == "cpu"


def _fix(remedy: Remedy) -> str:
    if "\n" in remedy.code:
        return f"paste the first fix, {remedy.where}"
    if remedy.where:
        return f"{remedy.where}: `{remedy.code}`"
    return f"`{remedy.code}`"
