"""The last line of a report: the one step to take next, or the statement that nothing is to be gained."""

import shlex

from lightning_feed.measure.stats import MIN_STEPS
from lightning_feed.measure.wall import Part
from lightning_feed.report.report import RunIdentity, is_toy, may_be_tuned, takes_turns
from lightning_feed.verdict.decide import share_text
from lightning_feed.verdict.diagnosis import Cause, Diagnosis, Remedy
from lightning_feed.verdict.notes import second_epoch
from lightning_feed.verdict.shares import LOOP_WORDS, in_ms
from lightning_feed.wording import source_line

ENOUGH_STEPS = 30
"""Number of steps that are enough for a verdict, including the warm-up."""
ARGUMENTS = "ARGUMENTS"
"""Stands for arguments that are not known."""
_DIAGNOSE = "lightning-feed diagnose your_script.py -- ARGUMENTS"
"""The command as notes contain it, because they are made without knowing the program."""
_MEASURE_THE_REST = "Train with LIGHTNING_FEED=1"
"""Words that identify the note of a diagnosis without fixes, where the parts that it did not run may be to blame."""
_TUNE = "train with LIGHTNING_FEED=tune, or with `AutotuneCallback()`"
_IN_YOUR_CODE: tuple[Cause, ...] = ("no workers", "cpu", "oversubscribed", "waiting", "unknown")
"""Causes for which an experiment can find the responsible lines in the user's code."""


def next_step(found: Diagnosis, run: RunIdentity | None = None, *, arguments: str = ARGUMENTS) -> str:
    """The best fix with its place; else the command that tells more; else that nothing is to be gained.

    Args:
        found: the verdict.
        run: the run that the verdict is about; None: not known.
        arguments: the program's arguments as typed in a shell. Not used if the program was given none.
    """
    run = RunIdentity() if run is None else run
    given = arguments if run.has_arguments else ""
    if found.measurements.facts.repeated:
        return "divide the stream in its `__iter__` by `torch.utils.data.get_worker_info()`, or use one worker"
    if is_toy(found):
        return "use larger batches: no other setting makes steps this short faster"
    if found.bottleneck == "unknown":
        return _to_a_verdict(found, run, given)
    if found.remedies:
        return _try_workers(found, run, given) or _fix(found.remedies[0])
    left_out = found.measurements.found.stripped
    if left_out and any(_MEASURE_THE_REST in one for one in found.notes):
        return f"{_train_measured(run, given)} to measure what was left out here ({left_out})"
    if found.bottleneck == "data":
        return _for_data(found, run, given)
    if found.bottleneck == "compute":
        return _for_compute(found, run, given)
    return next(iter(_notes(found, run, given)), _WITHOUT_NOTE[found.bottleneck])


def other_notes(found: Diagnosis, run: RunIdentity | None = None, *, arguments: str = ARGUMENTS) -> list[str]:
    """The notes that :func:`next_step` does not repeat, with the program's name in commands. Arguments as for it."""
    step = next_step(found, run, arguments=arguments)
    run = RunIdentity() if run is None else run
    notes = [
        one.replace(_DIAGNOSE, _command(found, run, arguments if run.has_arguments else "")) for one in found.notes
    ]
    return [one for one in notes if not step.endswith(one) and _MEASURE_THE_REST not in one]


def _notes(found: Diagnosis, run: RunIdentity, given: str) -> list[str]:
    """The notes that say what to do: all except the one on the time that validation and checkpoints take."""
    said = share_text(found.measurements)
    return [one.replace(_DIAGNOSE, _command(found, run, given)) for one in found.notes if one != said]


_WITHOUT_NOTE: dict[str, str] = {
    "framework": '`Trainer(profiler="simple")` names the callback or hook that takes the time between the steps',
    "copy": "send fewer bytes: a smaller dtype, such as uint8 images, or smaller batches",
    "validation": "validate less often: `Trainer(check_val_every_n_epoch=...)`, or on less: `limit_val_batches=...`",
    "checkpoints": "save less often: `ModelCheckpoint(every_n_train_steps=...)`",
}
"""Bottleneck -> the next step if the verdict has no note on it."""


def _try_workers(found: Diagnosis, run: RunIdentity, given: str) -> str:
    """The command that tries numbers of workers, if the first fix is a number that was not tried; else empty."""
    facts = found.measurements.facts
    untried = found.measurements.experiments is None and found.remedies[0].changes.startswith("num_workers=")
    if not untried or not may_be_tuned(facts):
        return ""
    if run.program == "notebook" or not run.program:
        return f"{_TUNE}: it tries numbers of workers, and takes the fastest"
    return f"`LIGHTNING_FEED=tune {_typed(run, given)}` tries numbers of workers, and takes the fastest"


def _fix(remedy: Remedy) -> str:
    if "\n" in remedy.code:
        return f"paste the first fix, {remedy.where}"
    return f"{remedy.where}: `{remedy.code}`" if remedy.where else f"`{remedy.code}`"


def _to_a_verdict(found: Diagnosis, run: RunIdentity, given: str) -> str:
    measured = found.measurements
    own = measured.found.tried_as("own")
    chosen = measured.found.tried_as("chosen")
    if own is not None and chosen is not None and chosen is not own:
        figures = f"{in_ms(own.step_ms, own.step_ms)} -> {in_ms(chosen.step_ms, own.step_ms)} ms a step"
        return f"num_workers={chosen.num_workers}: in trials, {figures}"
    if measured.stats.steps >= MIN_STEPS:
        return _fewer_threads(found, run, given) or _diagnose(found, run, given, "measures each part alone")
    if not measured.stats.steps and measured.found.loader_per_s:
        return "diagnose a program that trains, or call diagnose() with a LightningModule"
    return f"train for {ENOUGH_STEPS} steps or more"


def _for_data(found: Diagnosis, run: RunIdentity, given: str) -> str:
    measured = found.measurements
    facts = found.measurements.facts
    fewer = _fewer_threads(found, run, given)
    if fewer:
        return fewer
    if facts.keeps:
        return second_epoch(facts)
    turns = ""
    if takes_turns(found):
        turns = f"loading and {LOOP_WORDS[facts.stage]} take turns"
        turns += ", and workers would gain nothing; " if _workers_in_vain(found) else "; "
    if measured.found.functions:
        slowest = measured.found.functions[0]
        place = source_line(slowest.file, slowest.line)
        return f"{turns}make {slowest.name} faster, most of all {place}: it takes {slowest.ms_per_batch:.1f} ms a batch"
    notes = _notes(found, run, given)
    if measured.experiments is None and (found.cause in _IN_YOUR_CODE or not notes):
        asked = (one for one in notes if _command(found, run, given) in one)
        return turns + next(asked, _ask_more(found, run, given))
    if notes:
        return turns + notes[0]
    most = max(measured.found.costs, key=lambda cost: cost.cpu_ms, default=None)
    part = "" if most is None else f", above all in {most.name} ({most.cpu_ms:.1f} ms of CPU for a sample)"
    return f"{turns}make a batch with less work{part}: no loader setting is known to help"


def _workers_in_vain(found: Diagnosis) -> bool:
    """True if more workers were tried, and gained nothing."""
    return any(one.startswith("more workers") for one in found.why_not)


def _ask_more(found: Diagnosis, run: RunIdentity, given: str) -> str:
    facts = found.measurements.facts
    if found.cause == "hand-over":
        return _for_hand_over(found)
    if facts.loop == "trainer" and facts.stage == "fit":
        return _diagnose(found, run, given, "finds the lines of your code that take the time")
    if takes_turns(found) and _workers_in_vain(found):
        return "make a batch with less work"
    return "`lightning_feed.tune(loader)` tries other settings of this loader"


def _for_hand_over(found: Diagnosis) -> str:
    if found.grade == "slightly data-bound":
        return "nothing: batches are ready in time, and only handing them over takes time"
    if may_be_tuned(found.measurements.facts):
        return f"{_TUNE}: it tries other numbers of workers"
    takes = in_ms(found.stats.data_idle_ms, found.stats.step_ms or 0.0)
    return f"batches are ready in time, and handing one over takes {takes} ms: fewer or smaller tensors take less"


def _for_compute(found: Diagnosis, run: RunIdentity, given: str) -> str:
    measured = found.measurements
    notes = _notes(found, run, given)
    fewer = _fewer_threads(found, run, given)
    if fewer:
        return f"the loader keeps up; {fewer}"
    if found.cause in ("oversubscribed", "unknown"):  # the model alone is much faster than the step
        return next(iter(notes), _WITHOUT_NOTE["framework"])
    if found.cause == "launch" and notes:
        return notes[0]
    wall = measured.wall
    if wall is not None and len(notes) < len(found.notes):
        parts: tuple[Part, Part] = ("validation", "checkpoints")
        return f"the loader keeps up; {_WITHOUT_NOTE[max(parts, key=wall.seconds)]}"
    if measured.found.stripped:
        what = f"to measure what was left out here ({measured.found.stripped})"
        return f"{_train_measured(run, given)} {what}: the loader keeps up"
    return "nothing, the loader keeps up"


# --- commands -----------------------------------------------------------------------------------------------------


def _diagnose(found: Diagnosis, run: RunIdentity, given: str, what: str) -> str:
    how = " in a cell, with what `trainer.fit` is given," if run.program == "notebook" else ""
    return f"`{_command(found, run, given)}`{how} {what}"


def _command(found: Diagnosis, run: RunIdentity, given: str) -> str:
    """The command, or the call, that diagnoses the same training."""
    if run.program == "notebook":
        return "lightning_feed.diagnose(trainer, model)"
    program = _quoted(run.program) or "SCRIPT.py"
    return f"{_few_threads(found)}lightning-feed diagnose {program}{f' -- {given}' if given else ''}"


def _train_measured(run: RunIdentity, given: str) -> str:
    """The command that runs the program with our callbacks."""
    if run.program == "notebook":
        return "train with `GPUStarvationCallback()`"
    return f"train with `LIGHTNING_FEED=1 {_typed(run, given)}`"


def _few_threads(found: Diagnosis) -> str:
    """The variable that keeps torch's threads as few as in this run, if other programs compute beside it."""
    facts = found.measurements.facts
    if not facts.crowded or facts.device_type != "cpu" or facts.torch_threads is None:
        return ""
    return f"OMP_NUM_THREADS={facts.torch_threads} " if facts.torch_threads < (facts.usable_cpus or 1) else ""


def _typed(run: RunIdentity, given: str) -> str:
    """The command that runs the program."""
    program = _quoted(run.program) or "SCRIPT.py"
    python = "" if run.program and not run.program.startswith("-m ") and not run.program.endswith(".py") else "python "
    return f"{python}{program}{f' {given}' if given else ''}"


def _fewer_threads(found: Diagnosis, run: RunIdentity, given: str) -> str:
    """The step if torch uses more threads than other programs leave CPUs; empty if it does not.

    On a CPU, torch's threads wait for each other at each operation, and all of them for the one that lacks a CPU
    (``benchmarks/threads.py``).
    """
    facts = found.measurements.facts
    if not facts.crowded or facts.device_type != "cpu":
        return ""
    free = max(1, int((facts.usable_cpus or 1) * max(0.0, 1 - (facts.others_cpu_pct or 0.0) / 100)))
    if (facts.torch_threads or 1) <= free:
        return ""
    fewer = f"OMP_NUM_THREADS={free} {_typed(run, given)}"
    if run.program == "notebook":
        fewer = f"torch.set_num_threads({free})"
    return f"try `{fewer}`, since torch's {facts.torch_threads} threads wait for each other"


def _quoted(program: str) -> str:
    return program if not program or program.startswith("-m ") else shlex.quote(program)
