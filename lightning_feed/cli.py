"""The ``lightning-feed`` command: arguments, exit codes and printing, nothing else.

Exit codes: 0 done, 1 a FeedError (its message on stderr), 2 wrong usage, 128 and a signal's number where one
stopped it: 130 Ctrl-C, 143 SIGTERM, 141 nobody reads the output any more; that of a user's program which ends early.
"""

import argparse
import dataclasses
import io
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lightning_feed import __version__
from lightning_feed.errors import FeedError, SettingsError, printable

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    from lightning_feed.diagnosing.program import Fit
    from lightning_feed.watch.reports.report import Report
    from lightning_feed.watch.verdict.diagnosis import Diagnosis


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; None takes those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    program_arguments: list[str] = []
    if given[:1] in (["diagnose"], ["tune"]) and "--" in given:  # what follows is the program's, whatever it is
        at = given.index("--")
        given, program_arguments = given[:at], given[at + 1 :]
    arguments = _parser().parse_args(given)
    arguments.program_arguments = program_arguments
    if sys.stderr is None:  # closed by whoever started this: a file of data must not become its number 2
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the output cannot encode
    try:
        code = _run(arguments)
        sys.stdout.flush()  # what is left would be written at the very end, where nothing can be caught
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 141  # as a program that SIGPIPE ends
    return code


def _run(arguments: argparse.Namespace) -> int:
    try:
        # Each command imports what it needs itself: Lightning takes seconds, and --help should not.
        arguments.run(arguments)
    except FeedError as error:
        _say(str(error))
        return int(getattr(error, "exit_code", 1))
    except KeyboardInterrupt as stop:
        _say("stopped")
        return 128 + int(getattr(stop, "signal_number", signal.SIGINT))
    return 0


def _nobody_reads() -> bool:
    """Whether output goes to a program that has ended, such as ``head``; then what is left of it goes nowhere."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
    for stream in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # Python flushes both at its end
        os.close(nowhere)
    return bool(gone)


def _has_no_reader(stream: TextIO) -> bool:
    try:
        stream.flush()
        number = stream.fileno()
    except BrokenPipeError:
        return True
    except io.UnsupportedOperation:  # no file: a text in memory
        return False
    if not hasattr(select, "poll"):  # Windows
        return False
    # What was written without a buffer has left nothing to flush.
    waiting = select.poll()
    waiting.register(number, 0)
    return any(events & select.POLLERR for _, events in waiting.poll(0))


def _say(line: str) -> None:
    print(f"lightning-feed: {line}", file=sys.stderr)


def _print_json(value: object) -> None:
    print(json.dumps(value, default=str, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-feed", description="Keep the GPU fed in PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-feed {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_demo, _add_pack, _add_stage, _add_report, _add_compare, _add_diagnose, _add_tune, _add_doctor):
        add(commands)
    return parser


def _flag(command: "argparse._ActionsContainer", name: str, text: str) -> None:
    command.add_argument(name, action="store_true", help=text)


# --- demo, pack, stage --------------------------------------------------------------------------------------------


def _add_demo(commands: "Commands") -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small ResNet-18 on real JPEGs, first as most people write it, then fed; show both reports",
        description="Train torchvision's ResNet-18 on small images twice: with a plain DataLoader, then with "
        "FastDataModule, PrefetchCallback and GPUStarvationCallback. Both runs are measured in the same way.",
    )
    demo.add_argument("--data", type=Path, metavar="DIR", help="a folder of class folders (default: make images)")
    images = "images to make, or to take from DIR (default: 3000)"
    demo.add_argument("--images", type=int, default=3000, metavar="N", help=images)
    demo.add_argument("--epochs", type=int, default=2, metavar="N", help="epochs of each run (default: 2)")
    demo.add_argument("--out", type=Path, default=Path("feed_demo"), metavar="DIR", help="default: feed_demo")
    _flag(demo, "--json", "print the figures as JSON instead of a table")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    from lightning_feed.demo import run_demo

    outcome = run_demo(data=arguments.data, images=arguments.images, epochs=arguments.epochs, out=arguments.out)
    print(outcome.as_json() if arguments.json else outcome.as_text())


def _add_pack(commands: "Commands") -> None:
    pack = commands.add_parser(
        "pack",
        help="pack a folder of many small files into a few large ones",
        description="Pack SRC, a folder of class folders (with train, val, test around them or not), into DEST. Run "
        "again after a kill, it goes on where it was. ImageFolderDataModule and PackedDataset read the pack.",
    )
    pack.add_argument("source", metavar="SRC", help="a folder of class folders, or its URL (s3://...)")
    pack.add_argument("dest", type=Path, metavar="DEST", help="where the pack is to be")
    pack.add_argument("--format", choices=("lmdb", "hdf5", "litdata"), default="lmdb", help="default: lmdb")
    pack.add_argument("--short-side", type=int, metavar="PX", help="resize larger images once, to this shorter side")
    quality = "of JPEGs that are written anew: those that --short-side makes smaller (default: 95), or all"
    pack.add_argument("--quality", type=int, metavar="Q", help=quality)
    _flag(pack, "--decoded", "store decoded pixels in place of files")
    pack.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each CPU)")
    pack.add_argument("--on-error", choices=("raise", "skip"), default="raise", help="for images that cannot be read")
    _flag(pack, "--force", "replace a pack that is there")
    _flag(pack, "--verify", "read everything back and compare checksums")
    _flag(pack, "--json", "print what was done as JSON")
    pack.set_defaults(run=_pack)


def _pack(arguments: argparse.Namespace) -> None:
    from lightning_feed.archive import pack

    names = ("format", "short_side", "quality", "decoded", "workers", "on_error", "force", "verify")
    done = pack(arguments.source, arguments.dest, **{name: getattr(arguments, name) for name in names})
    if arguments.json:
        _print_json(dataclasses.asdict(done))
        return
    for problem in done.skipped:
        print(f"left out: {printable(problem)}", file=sys.stderr)
    verified = ", verified" if arguments.verify else ""
    print(f"{done.path}: {done.samples} samples, {done.total_bytes / 1e6:.1f} MB, {done.took_s:.1f} s{verified}")


def _add_stage(commands: "Commands") -> None:
    stage = commands.add_parser(
        "stage",
        help="copy data to memory or a local disk, or bring the copy there up to date",
        description="Copy SRC to DEST/<name of SRC>. Only files that are new or have changed are copied; run again "
        "after a kill, it goes on. Only you can open the copy. No root is needed: /dev/shm/<user>, or any folder of "
        "yours.",
    )
    stage.add_argument("source", metavar="SRC", help="a folder or a file, or its URL (s3://...)")
    where = "a folder in memory (/dev/shm/<user>) or on a local disk"
    stage.add_argument("dest", type=Path, metavar="DEST", help=where)
    _flag(stage, "--hash", "compare the contents of all files too, byte by byte")
    _flag(stage, "--force", "remove what lies there and copy everything")
    stage.add_argument("--wait", type=float, metavar="S", help="seconds to wait for another process that copies")
    _flag(stage, "--remove", "remove the copy instead")
    _flag(stage, "--json", "print what was done as JSON")
    stage.set_defaults(run=_stage)


def _stage(arguments: argparse.Namespace) -> None:
    from lightning_feed.archive import mount_command, stage, unstage

    if arguments.remove:
        removed = unstage(arguments.source, arguments.dest)
        print(json.dumps({"removed": removed}) if arguments.json else "Removed." if removed else "There is no copy.")
        return
    done = stage(arguments.source, arguments.dest, hash=arguments.hash, force=arguments.force, wait_s=arguments.wait)
    if arguments.json:
        _print_json(dataclasses.asdict(done))
        return
    print(f"{done.path}: {done.files} files, {done.total_bytes / 1e6:.1f} MB", end="; ")
    print(f"{done.copied_files} copied ({done.copied_bytes / 1e6:.1f} MB), {done.removed} removed, {done.took_s:.1f} s")
    if not done.in_memory:
        print("This copy is on a disk. For one in memory, mount a tmpfs of the right size and stage to it:")
        print(f"  {mount_command('/mnt/ram', done.total_bytes)}")


# --- report, compare, doctor --------------------------------------------------------------------------------------


def _add_report(commands: "Commands") -> None:
    report = commands.add_parser(
        "report",
        help="show the report of a run; fail when the GPU waits too much",
        description="Show the feed_report.json of a run. With --fail-above the exit code is 1 when training waits for "
        "data for more than PCT percent of each step, and when that was not measured: a gate for CI.",
    )
    report.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, or its feed_report.json")
    report.add_argument("--fail-above", type=_percent, metavar="PCT", help="exit with 1 above this share, 0 to 100")
    form = report.add_mutually_exclusive_group()
    _flag(form, "--json", "print the report as JSON")
    _flag(form, "--markdown", "print the report as Markdown")
    form.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    report.set_defaults(run=_report)


def _percent(text: str) -> float:
    """A share from the command line. NaN would let every run pass."""
    share = float(text)
    if not 0 <= share <= 100:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 100")
    return share


def _report(arguments: argparse.Namespace) -> None:
    from lightning_feed.watch.reports.compare import check_starved
    from lightning_feed.watch.reports.document import as_json, read_document
    from lightning_feed.watch.reports.files import as_html, as_markdown, write_whole

    report = read_document(arguments.folder)
    if arguments.folder.is_dir():
        _say(f"{report.path}, written {report.written_at}")
    if arguments.html is not None:
        write_whole(arguments.html, as_html(report))
        print(arguments.html)
    elif arguments.json or arguments.markdown:
        print((as_json if arguments.json else as_markdown)(report), end="")
    else:
        print(_as_text(report))
    if arguments.fail_above is not None:
        _say(check_starved(report, above_pct=arguments.fail_above))


def _as_text(report: "Report") -> str:
    from lightning_feed.watch.reports.compare import check_text
    from lightning_feed.watch.reports.files import as_text

    return "\n".join([as_text(report.diagnosis), *(f"card  {check_text(one)}" for one in report.report_card)])


def _add_compare(commands: "Commands") -> None:
    compare = commands.add_parser(
        "compare",
        help="compare two reports: what changed, what was predicted, what was achieved",
        description="Compare the reports of two runs, the earlier first.",
    )
    compare.add_argument("before", type=Path, metavar="A", help="the earlier run's folder, or its feed_report.json")
    compare.add_argument("after", type=Path, metavar="B", help="the later run's")
    _flag(compare, "--json", "print the comparison as JSON")
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    from lightning_feed.watch.reports.compare import compare, comparison_text
    from lightning_feed.watch.reports.document import read_document, to_plain

    found = compare(read_document(arguments.before), read_document(arguments.after))
    if arguments.json:
        _print_json(to_plain(found))
    else:
        print(comparison_text(found))


def _add_doctor(commands: "Commands") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="look at the machine and the environment: what would keep a GPU from being fed",
        description="CPUs, memory, /dev/shm, limits, GPU and driver, threads, decoders, versions: what each means and "
        "what to do. Nothing is changed.",
    )
    doctor.add_argument("--data", type=Path, metavar="PATH", help="say too on which file system this lies")
    _flag(doctor, "--json", "print the findings as JSON")
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    from lightning_feed.watch.doctor import as_plain, as_text
    from lightning_feed.watch.doctor.looks import examine

    found = examine(arguments.data)
    if arguments.json:
        _print_json(as_plain(found))
    else:
        print(as_text(found))


# --- diagnose, tune -----------------------------------------------------------------------------------------------


def _add_diagnose(commands: "Commands") -> None:
    diagnose = commands.add_parser(
        "diagnose",
        help="find what limits training by experiments, and what each remedy would give",
        usage="lightning-feed diagnose [options] (SCRIPT.py | -m MODULE | TARGET) [-- ARGS]",
        description="Run SCRIPT.py, or a module, with ARGS until it calls Trainer.fit, train for some seconds in the "
        "place of that, then change one part of the pipeline at a time; the program ends there. Or TARGET, "
        "module.py:NAME or package.module:NAME: a function or class without arguments, or an object, that gives a "
        "LightningDataModule, or a LightningModule and a LightningDataModule. Takes about 90 s.",
    )
    _add_target(diagnose)
    _flag(diagnose, "--quick", "a third of the time, figures less certain")
    diagnose.add_argument("--only", metavar="LIST", help="experiments to run, such as model,loader (default: all)")
    out = Path("feed_diagnosis")
    diagnose.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"default: {out}")
    previous = "of an earlier run: say what became of its predictions"
    diagnose.add_argument("--previous", type=Path, metavar="REPORT", help=previous)
    _flag(diagnose, "--callbacks", "run callbacks of your own classes too, whatever they write or upload")
    _flag(diagnose, "--json", "print the report as JSON")
    diagnose.set_defaults(run=_diagnose)


def _diagnose(arguments: argparse.Namespace) -> None:
    from lightning_feed.diagnosing import diagnose
    from lightning_feed.diagnosing.failure import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten
    from lightning_feed.watch.reports.document import as_json, make_report, read_document
    from lightning_feed.watch.reports.files import check_writable

    # Read before anything is written: it may lie where this one goes.
    earlier = None if arguments.previous is None else read_document(arguments.previous)
    check_writable(arguments.out)  # before a program is run for minutes
    out = arguments.out.absolute()  # a program may change the current folder

    def look(fit: "Fit") -> tuple["Diagnosis", DiagnosisFailed | DiagnosisInterrupted | DiagnosisNotWritten | None]:
        try:
            return diagnose(
                fit.trainer,
                fit.model,
                fit.datamodule,
                train_dataloaders=fit.train_dataloaders,
                quick=arguments.quick,
                only=arguments.only,
                out=out,
                previous=earlier,
                callbacks=arguments.callbacks,
            ), None
        except (DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten) as stop:
            return stop.diagnosis, stop

    (found, ended), end_of_program = _with_fit(arguments, look)
    report = make_report(found, previous=earlier)
    print(as_json(report) if arguments.json else _as_text(report))
    if earlier is not None and not report.report_card:
        _say(f"no remedy of {earlier.path} that can be checked is in effect")
    if ended is None:
        print(f"Written to {arguments.out}.", file=sys.stderr)
        sys.stderr.write(end_of_program)
        return
    if isinstance(ended, DiagnosisInterrupted) and ended.not_written:
        _say(ended.not_written)
    elif not isinstance(ended, DiagnosisNotWritten) and ended.written:
        how = "the failure" if isinstance(ended, DiagnosisFailed) else "it was stopped"
        _say(f"what was measured before {how} is in {arguments.out}")
    sys.stderr.write(end_of_program)
    raise ended


def _add_tune(commands: "Commands") -> None:
    tune = commands.add_parser(
        "tune",
        help="find num_workers and the other loader settings, by a few trials",
        usage="lightning-feed tune [options] (SCRIPT.py | -m MODULE | TARGET) [-- ARGS]",
        description="Programs and TARGET are as for diagnose. With a LightningModule the smallest setting is looked "
        "for that keeps it fed, else the fastest. Takes about 30 s; what was found is remembered.",
    )
    _add_target(tune)
    tune.add_argument("--loader", metavar="NAME", help="which of several training loaders: its key or number")
    tune.add_argument("--budget", type=float, default=30.0, metavar="S", help="seconds for the trials (default: 30)")
    tune.add_argument("--trials", type=int, default=5, metavar="N", help="at most so many trials (default: 5)")
    _flag(tune, "--fresh", "look anew, whatever is remembered")
    demand = "what the model can take (default: measured)"
    tune.add_argument("--demand", type=float, metavar="SAMPLES_PER_S", help=demand)
    sweep, grid = "try a whole grid of workers too (default LIST: 0,5,10,...,50)", tuple(range(0, 51, 5))
    tune.add_argument("--sweep", type=_workers_grid, nargs="?", const=grid, metavar="LIST", help=sweep)
    tune.add_argument("--plot", type=Path, metavar="FILE", help="draw the sweep into this PNG file")
    _flag(tune, "--json", "print what was found as JSON")
    tune.set_defaults(run=_tune)


def _workers_grid(text: str) -> tuple[int, ...]:
    """Numbers of workers from the command line."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no list of whole numbers, such as 0,2,4,8") from None


def _tune(arguments: argparse.Namespace) -> None:
    from lightning_feed.extras import require
    from lightning_feed.load.trials.search import Goal
    from lightning_feed.load.trials.sweep import write_plot
    from lightning_feed.tuning.output import tuned_document, tuned_text
    from lightning_feed.tuning.run import run_tune

    if arguments.plot is not None and arguments.sweep is None:
        raise SettingsError("--plot draws a sweep, and there is none. Add --sweep, or leave --plot out.")
    plot = None if arguments.plot is None else arguments.plot.absolute()  # a program may change the current folder
    if plot is not None:
        require("matplotlib", extra="plot", why="--plot")  # before a minute is spent on trials
    goal = Goal(budget_s=arguments.budget, max_trials=arguments.trials)
    wanted = {
        "samples_per_s": arguments.demand,
        "fresh": arguments.fresh,
        "grid": arguments.sweep,
        "loader": arguments.loader,
    }
    (tuned, swept, place), end_of_program = _with_fit(arguments, lambda fit: run_tune(fit, goal, **wanted))
    if arguments.json:
        document = tuned_document(tuned, place)
        _print_json(document if swept is None else {**document, "sweep": swept.to_dict()})
    else:
        print(tuned_text(tuned, place))
        if swept is not None:
            print(f"\n{swept.text()}")
    if swept is not None and plot is not None:
        print(f"Drawn into {write_plot(swept, plot)}.", file=sys.stderr)
    sys.stderr.write(end_of_program)


def _add_target(command: argparse.ArgumentParser) -> None:
    what = command.add_mutually_exclusive_group(required=True)
    target = "your program, or module.py:NAME, package.module:NAME"
    what.add_argument("target", nargs="?", metavar="SCRIPT.py or TARGET", help=target)
    what.add_argument("-m", dest="module", metavar="MODULE", help="your program, as for python -m")
    command.add_argument("--accelerator", metavar="A", help="of TARGET's Trainer (default: auto)")


def _with_fit(arguments: argparse.Namespace, look: "Callable[[Fit], Any]") -> tuple[Any, str]:
    """What ``look`` gives for what TARGET makes, or for the first fit of a program, and a line on how that ended."""
    from lightning_feed.diagnosing.program import Program, open_target, run_until_fit

    target, given = arguments.target, tuple(arguments.program_arguments)
    if target is not None and ":" in target and not target.endswith(".py"):
        if given:
            raise SettingsError(f"What follows -- are arguments of a program, and {target} is none. Leave them out.")
        with open_target(target, arguments.accelerator or "auto") as fit:
            return look(fit), ""
    if arguments.accelerator is not None:
        raise SettingsError("--accelerator is for TARGET: a program has a Trainer of its own. Set it there.")
    program = Program(arguments.module or target, given, is_module=target is None)
    found, fit = run_until_fit(program, look)
    return found, f"lightning-feed: {program} was {fit.went_on}\n"
