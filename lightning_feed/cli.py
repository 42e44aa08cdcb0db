"""The ``lightning-feed`` command: arguments, exit codes and printing.

Exit codes: 0 done; 1 a FeedError (its message is on stderr); 2 wrong usage or a SettingsError; 128 plus a signal's
number if one stopped it: 130 Ctrl-C, 143 SIGTERM, 141 a closed pipe. If a user's program ends early, its own exit code.
"""

import argparse
import dataclasses
import difflib
import inspect
import io
import json
import os
import shlex
import signal
import sys
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from lightning_feed import __version__
from lightning_feed.errors import FeedError, SettingsError, printable

if TYPE_CHECKING:
    from lightning_feed.diagnosing.program import Fit
    from lightning_feed.report.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; None: those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    program_arguments: list[str] = []
    if given[:1] in (["diagnose"], ["tune"]) and "--" in given:  # what follows is the program's, whatever it is
        at = given.index("--")
        given, program_arguments = given[:at], given[at + 1 :]
    parser = make_parser()
    names = [_name_of(run) for run in _COMMANDS]
    close = difflib.get_close_matches("".join(given[:1]), names, 1)
    if close and given[0] not in names:
        parser.error(f"there is no command {given[0]!r}. Did you mean {close[0]!r}?")
    arguments, others = parser.parse_known_args(given)
    if others:
        hint = ""
        program = getattr(arguments, "target", None) or getattr(arguments, "module", None)
        if program is not None and given.index(program) < given.index(others[0]):
            hint = f". Those of your program come after two dashes: {_with_dashes(given, others, program_arguments)}"
        parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")
    arguments.program_arguments = program_arguments
    if sys.stderr is None:  # closed by the caller: else the next file to be opened would get file descriptor 2
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the output cannot encode
    # Each command imports what it needs itself: Lightning takes seconds, and --help should not.
    return _run(partial(arguments.run, arguments))


def _run(run: Callable[[], object]) -> int:
    """Run a command, print its error, and return the exit code."""
    try:
        run()
    except FeedError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt as stop:
        _say("stopped")
        return 128 + int(getattr(stop, "signal_number", signal.SIGINT))
    return 0


def _print(text: str, stream: TextIO | None = None) -> None:
    """Print to stdout, or another stream. End the program if the reader, such as ``head``, has closed the pipe."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python flushes the stream at exit
        raise SystemExit(141) from None  # like a program ended by SIGPIPE


def _say(line: str) -> None:
    _print(f"lightning-feed: {line}", sys.stderr)


def _print_found(arguments: argparse.Namespace, document: object, text: str) -> None:
    _print(json.dumps(document, default=str, indent=2) if arguments.json else text)


def _with_dashes(given: Sequence[str], others: Sequence[str], after: Sequence[str]) -> str:
    """The command line to type, with ``others`` among the program's arguments after two dashes."""
    left = list(others)
    ours = [word for word in given if not (left and word == left[0] and left.pop(0))]
    return shlex.join(["lightning-feed", *ours, "--", *others, *after])


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands. shtab reads it, too, for shell completion."""
    parser = argparse.ArgumentParser(prog="lightning-feed", description="Keep the GPU fed in PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-feed {__version__}")
    parser.set_defaults(run=lambda _: parser.exit(2, parser.format_help()))  # without a command
    commands = parser.add_subparsers(metavar="COMMAND")
    for run, options in _COMMANDS.items():
        name = _name_of(run)
        summary, _, description = inspect.cleandoc(run.__doc__ or "").partition("\n\n")
        usage = f"lightning-feed {name} [options] {_PROGRAM_USAGE}" if run in (_diagnose, _tune) else None
        command = commands.add_parser(name, help=summary, description=description, usage=usage, allow_abbrev=False)
        command.set_defaults(run=run)
        _add_options(command, options)
    return parser


def _name_of(run: Callable[[argparse.Namespace], None]) -> str:
    return run.__name__.strip("_")


class _Option(NamedTuple):
    names: tuple[str, ...]
    given: dict[str, Any]


class _OneOf(NamedTuple):
    """Options that exclude each other."""

    options: tuple[_Option, ...]
    required: bool = False


def _add_options(to: "argparse._ActionsContainer", options: Iterable[_Option | _OneOf]) -> None:
    for one in options:
        if isinstance(one, _OneOf):
            _add_options(to.add_mutually_exclusive_group(required=one.required), one.options)
        else:
            to.add_argument(*one.names, **one.given)


def _option(*names: str, **given: object) -> _Option:
    return _Option(names, given)


def _flag(name: str, text: str) -> _Option:
    return _option(name, action="store_true", help=text)


def _json(what: str) -> _Option:
    return _flag("--json", f"print {what} as JSON")


class _Gone(argparse.Action):
    """A removed option. Its constant is the error message, which says what to do instead."""

    def __init__(self, **given: object) -> None:
        super().__init__(**given, help=argparse.SUPPRESS)  # type: ignore[arg-type]

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} is gone: {self.const}")


# --- demo, pack, stage --------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> None:
    """Train a small model on real JPEGs as most people write it, then fed, then as the report advises; compare.

    Train torchvision's ShuffleNetV2 on small images three times: with a plain DataLoader; with FastDataModule and
    PrefetchCallback; and with ImageFolderDataModule, which the report of the first run advises. All are measured by
    GPUStarvationCallback. Takes about a minute on two idle CPUs.
    """
    from lightning_feed.demo import demo_text, run_demo

    outcome = run_demo(data=arguments.data, images=arguments.images, epochs=arguments.epochs, out=arguments.out)
    _print_found(arguments, outcome, demo_text(outcome))
    if arguments.open and not webbrowser.open(outcome["report"].absolute().as_uri()):
        _say(f"no browser could be started: open {outcome['report']} yourself")


def _pack(arguments: argparse.Namespace) -> None:
    """Pack a folder of many small files into a few large ones.

    Pack SRC, a folder of class folders (with train, val, test around them or not), into DEST. If interrupted, run it
    again: packing restarts. ImageFolderDataModule and PackedDataset read the pack.
    """
    from lightning_feed.storage import pack

    names = ("format", "short_side", "decoded", "on_error", "force", "verify")
    done = pack(arguments.source, arguments.dest, **{name: getattr(arguments, name) for name in names})
    for problem in done.skipped:
        _print(f"left out: {printable(problem)}", sys.stderr)
    verified = ", verified" if arguments.verify else ""
    place = printable(str(done.path))
    text = f"{place}: {done.samples} samples, {done.total_bytes / 1e6:.1f} MB, {done.took_s:.1f} s{verified}"
    _print_found(arguments, dataclasses.asdict(done), text)


def _stage(arguments: argparse.Namespace) -> None:
    """Copy data to memory or a local disk, unless the copy there is up to date.

    Copy SRC to DEST/<name of SRC>, whole or not at all. A copy of files that have changed since is replaced. Only you
    can open the copy. No root is needed: /dev/shm/<user>, or any folder of yours.
    """
    from lightning_feed.storage.file_system import mount_command
    from lightning_feed.storage.staging import stage

    done = stage(arguments.source, arguments.dest)
    copied = "copied" if done.copied else "up to date"
    place = printable(str(done.path))
    text = f"{place}: {done.files} files, {done.total_bytes / 1e6:.1f} MB, {copied}, {done.took_s:.1f} s"
    if not done.in_memory:
        mount = mount_command("/mnt/ram", done.total_bytes)
        text += f"\nThis copy is on a disk. For one in memory, mount a tmpfs and stage to it:\n  {mount}"
    _print_found(arguments, dataclasses.asdict(done), text)


# --- report, compare, doctor --------------------------------------------------------------------------------------


def _percent(text: str) -> float:
    """Read a percentage from the command line. NaN is refused, because every run would pass with it."""
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 <= share <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return share


def _report(arguments: argparse.Namespace) -> None:
    """Show the report of a run; fail when the GPU waits too much.

    Show the feed_report.json of a run. With --fail-above the exit code is 1 when training waits for data for more
    than PCT percent of each step, and when that was not measured: a gate for CI.
    """
    from lightning_feed.report.compare import check_starved
    from lightning_feed.report.document import as_json, read_document
    from lightning_feed.report.files import as_html, write_whole

    report = read_document(arguments.folder)
    if arguments.folder.is_dir():
        _say(f"{report.path}, written {report.written_at}")
    if arguments.html is not None:
        write_whole(arguments.html, as_html(report))
        _print(arguments.html)
    elif arguments.json:
        _print(as_json(report).removesuffix("\n"))
    else:
        _print(_as_text(report))
    if arguments.fail_above is not None:
        _say(check_starved(report, above_pct=arguments.fail_above))


def _as_text(report: "Report", arguments: str | None = None) -> str:
    from lightning_feed.report.compare import check_text
    from lightning_feed.report.files import as_text
    from lightning_feed.report.next_step import ARGUMENTS

    card = [f"card  {check_text(one)}" for one in report.report_card]
    return as_text(report.diagnosis, report.run, beside=card, arguments=arguments or ARGUMENTS)


def _compare(arguments: argparse.Namespace) -> None:
    """Compare two reports: what changed, what was predicted, what was achieved.

    Compare the reports of two runs, the earlier first.
    """
    from lightning_feed.report.compare import compare, comparison_text
    from lightning_feed.report.document import read_document, to_plain

    found = compare(read_document(arguments.before), read_document(arguments.after))
    _print_found(arguments, to_plain(found), comparison_text(found))


def _doctor(arguments: argparse.Namespace) -> None:
    """Look at the machine and the environment: what would keep a GPU from being fed.

    CPUs, memory, /dev/shm, limits, GPU and driver, threads, decoders, versions: what each means and what to do.
    Nothing is changed.
    """
    from lightning_feed.doctor import as_plain, as_text
    from lightning_feed.doctor.checks import examine

    found = examine(arguments.data)
    _print_found(arguments, as_plain(found), as_text(found))


# --- diagnose, tune -----------------------------------------------------------------------------------------------


def _diagnose(arguments: argparse.Namespace) -> None:
    """Find what limits training by experiments, and what each remedy would give.

    Run SCRIPT.py, or a module, with ARGS until it calls Trainer.fit. Then train for some seconds in place of that call,
    and change one part of the pipeline at a time. The rest of the program is not run. Or give TARGET, module.py:NAME or
    package.module:NAME: a LightningDataModule, a pair of a LightningModule and a LightningDataModule, or a function or
    class without arguments that returns them. Takes about 90 s.
    """
    from lightning_feed.diagnosing import diagnose
    from lightning_feed.diagnosing.failures import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten
    from lightning_feed.report.document import as_json, make_report, read_document
    from lightning_feed.report.files import check_writable
    from lightning_feed.report.report import arguments_now

    # Read before anything is written: the new report may replace it.
    earlier = None if arguments.previous is None else read_document(arguments.previous)
    check_writable(arguments.out)  # before a program is run for minutes
    out = arguments.out.absolute()  # a program may change the current folder
    options = {"quick": arguments.quick, "only": arguments.only, "callbacks": arguments.callbacks}

    def run(fit: "Fit") -> None:
        stop = None
        try:
            found = diagnose(
                fit.trainer,
                fit.model,
                fit.datamodule,
                train_dataloaders=fit.train_dataloaders,
                out=out,
                previous=earlier,
                **options,
            )
        except (DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten) as error:  # raised below
            stop = error
            found = error.diagnosis
        report = make_report(found, previous=earlier)
        _print(as_json(report).removesuffix("\n") if arguments.json else _as_text(report, arguments_now()))
        if earlier is not None and not report.report_card:
            _say(f"no remedy of {earlier.path} that can be checked is in effect")
        if stop is None:
            newest = read_document(out).path or out
            _print(f"Written to {arguments.out / newest.stem}.html, .json and .md.", sys.stderr)
        elif stop.written:
            _say(f"what was measured until then is in {arguments.out}")
        for line in (getattr(stop, "not_written", ""), fit.ended):
            if line:
                _say(line)
        if stop is not None:
            raise stop

    _with_fit(arguments, run)


def _workers_grid(text: str) -> tuple[int, ...]:
    """Numbers of workers from the command line."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 0,2,4,8") from None


def _tune(arguments: argparse.Namespace) -> None:
    """Find num_workers and the other loader settings, by a few trials.

    Programs and TARGET are as for diagnose. With a LightningModule, finds the smallest setting that keeps it fed, else
    the fastest. Takes about 30 s. The result is remembered.
    """
    from lightning_feed.extras import require
    from lightning_feed.trials.search import Goal
    from lightning_feed.tuning.run import run_tune, tuned_document, tuned_text, write_plot

    plot = None if arguments.plot is None else arguments.plot.absolute()  # a program may change the current folder
    if plot is not None:
        if arguments.sweep is None:
            raise SettingsError("--plot draws a sweep, but there is none. Add --sweep, or leave --plot out.")
        require("matplotlib", extra="plot", why="--plot")  # before a minute is spent on trials
    goal = Goal(budget_s=arguments.budget, max_trials=arguments.trials)

    def run(fit: "Fit") -> None:
        tuned, swept, place = run_tune(
            fit,
            goal,
            samples_per_s=arguments.demand,
            fresh=arguments.fresh,
            grid=arguments.sweep,
            loader=arguments.loader,
        )
        document = tuned_document(tuned, place)
        text = tuned_text(tuned, place)
        if swept is not None:
            document = {**document, "sweep": swept.to_dict()}
            text = f"{text}\n\n{swept.text()}"
        _print_found(arguments, document, text)
        if swept is not None and plot is not None:
            _print(f"Drawn into {write_plot(swept, plot)}.", sys.stderr)
        if fit.ended:
            _say(fit.ended)

    _with_fit(arguments, run)


def _with_fit(arguments: argparse.Namespace, run: "Callable[[Fit], None]") -> None:
    """Call ``run`` with TARGET's objects; or with a program's first fit, and end the process there."""
    from lightning_feed.diagnosing.program import Program, fit_of_target, run_until_fit

    target = arguments.target
    given = tuple(arguments.program_arguments)
    if target is not None and ":" in target and not target.endswith(".py"):
        if given:
            raise SettingsError(f"Arguments after -- are for a program, but {target} is not one. Leave them out.")
        run(fit_of_target(target, arguments.accelerator or "auto"))
        return
    if arguments.accelerator is not None:
        raise SettingsError("--accelerator is for TARGET: a program has a Trainer of its own. Set it there.")
    program = Program(arguments.module or target, given, is_module=target is None)
    run_until_fit(program, lambda fit: _run(partial(run, fit)))


# --- the commands and their options -------------------------------------------------------------------------------

_PROGRAM_USAGE = "(SCRIPT.py | -m MODULE | TARGET) [-- ARGS]"
_TARGET = (
    _OneOf(
        (
            _option(
                "target",
                nargs="?",
                metavar="TARGET",
                help="your program (train.py), or module.py:NAME, package.module:NAME",
            ),
            _option("-m", dest="module", metavar="MODULE", help="your program, as for python -m"),
        ),
        required=True,
    ),
    _option("--accelerator", metavar="A", help="accelerator of TARGET's Trainer (default: auto)"),
)
_COMMANDS: dict[Callable[[argparse.Namespace], None], tuple[_Option | _OneOf, ...]] = {
    _demo: (
        _json("the figures"),
        _option("--data", type=Path, metavar="DIR", help="a folder of class folders (default: make images)"),
        _option(
            "--images", type=int, default=512, metavar="N", help="images to make, or to take from DIR (default: 512)"
        ),
        _option("--epochs", type=int, default=3, metavar="N", help="epochs of each run (default: 3)"),
        _option("--out", type=Path, default=Path("feed_demo"), metavar="DIR", help="default: feed_demo"),
        _flag("--open", "open the report in a browser"),
    ),
    _pack: (
        _json("what was done"),
        _option("source", metavar="SRC", help="a folder of class folders"),
        _option("dest", type=Path, metavar="DEST", help="the pack to write"),
        _option("--format", choices=("flat", "lmdb", "hdf5"), default="flat", help="default: flat"),
        _option("--short-side", type=int, metavar="PX", help="resize larger images once, to this shorter side"),
        _flag("--decoded", "store decoded pixels in place of files"),
        _option("--on-error", choices=("raise", "skip"), default="raise", help="for images that cannot be read"),
        _flag("--force", "replace an existing pack"),
        _flag("--verify", "read everything back and compare checksums"),
    ),
    _stage: (
        _json("what was done"),
        _option("source", metavar="SRC", help="a folder or a file, or its URL (s3://...)"),
        _option("dest", type=Path, metavar="DEST", help="a folder in memory (/dev/shm/<user>) or on a local disk"),
    ),
    _report: (
        _option("folder", type=Path, metavar="RUN", help="a run's folder, or its feed_report.json"),
        _option("--fail-above", type=_percent, metavar="PCT", help="exit with 1 above this share, 0 to 100"),
        _OneOf(
            (
                _json("the report"),
                _option("--html", type=Path, metavar="FILE", help="write the report as one HTML page"),
                _option(
                    "--markdown",
                    nargs=0,
                    action=_Gone,
                    const="the report as Markdown is the file feed_report.md beside feed_report.json",
                ),
            )
        ),
    ),
    _compare: (
        _json("the comparison"),
        _option("before", type=Path, metavar="A", help="the earlier run's folder, or its feed_report.json"),
        _option("after", type=Path, metavar="B", help="the later run's"),
    ),
    _diagnose: (
        _json("the report"),
        *_TARGET,
        _flag("--quick", "a third of the time, figures less certain"),
        _option("--only", metavar="LIST", help="experiments to run, such as model,loader (default: all)"),
        _option("--out", type=Path, default=Path("feed_diagnosis"), metavar="DIR", help="default: feed_diagnosis"),
        _option(
            "--previous",
            type=Path,
            metavar="REPORT",
            help="report of an earlier run, to check its predictions",
        ),
        _flag("--callbacks", "also run callbacks of your own classes, even if they write or upload"),
    ),
    _tune: (
        _json("what was found"),
        *_TARGET,
        _option("--loader", metavar="NAME", help="key or number of the loader, if there are several"),
        _option("--budget", type=float, default=30.0, metavar="S", help="seconds for the trials (default: 30)"),
        _option("--trials", type=int, default=5, metavar="N", help="largest number of trials (default: 5)"),
        _flag("--fresh", "ignore remembered results"),
        _option("--demand", type=float, metavar="SAMPLES_PER_S", help="what the model can take (default: measured)"),
        _option(
            "--sweep",
            type=_workers_grid,
            nargs="?",
            const=tuple(range(0, 51, 5)),
            metavar="LIST",
            help="try a whole grid of workers too (default LIST: 0,5,10,...,50)",
        ),
        _option("--plot", type=Path, metavar="FILE", help="draw the sweep into this PNG file"),
    ),
    _doctor: (
        _json("the findings"),
        _option("--data", metavar="PATH", help="also check the file system of this path"),
    ),
}
"""Options by the function that runs a command. The command's name and description come from the function."""
