"""The ``lightning-feed`` command: arguments, exit codes and printing.

Exit codes: 0 done; 1 a FeedError (its message is on stderr); 2 wrong usage or a SettingsError; 130 Ctrl-C and 141 a
closed pipe, which are 128 plus the signal's number. If a user's program ends early, the program's own exit code.
"""

import argparse
import dataclasses
import inspect
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lightning_feed import __version__
from lightning_feed.errors import FeedError, SettingsError
from lightning_feed.wording import printable

if TYPE_CHECKING:
    from lightning_feed.diagnosing.program import Fit
    from lightning_feed.report.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; None for those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    program_arguments: list[str] = []
    if words[:1] in (["diagnose"], ["tune"]) and "--" in words:  # all that follows are the program's own arguments
        dashes = words.index("--")
        program_arguments = words[dashes + 1 :]
        words = words[:dashes]
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        hint = ""
        if words[0] in ("diagnose", "tune"):
            hint = f". Those of your program come after two dashes: lightning-feed {words[0]} SCRIPT.py -- ARGS"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    arguments.program_arguments = program_arguments
    if sys.stderr is None:  # closed by the caller: else the next file to be opened would get file descriptor 2
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters that the output cannot encode
    # Each command imports what it needs itself: Lightning takes seconds, and --help should not.
    return _run(partial(arguments.run, arguments))


def _run(run: Callable[[], object]) -> int:
    """Run a command, print its error, and return the exit code."""
    try:
        run()
    except FeedError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("stopped")
        return 128 + signal.SIGINT
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


def _print_result(arguments: argparse.Namespace, document: object, text: str) -> None:
    if arguments.json:
        _print(json.dumps(document, default=str, indent=2))
    else:
        _print(text)


# --- demo, pack, stage --------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> None:
    """Train a small model three ways and compare: a plain DataLoader, FastDataModule, and the report's advice.

    Train torchvision's ShuffleNetV2 on small images three times: with a plain DataLoader; with FastDataModule and
    PrefetchCallback; and with ImageFolderDataModule, which the report of the first run advises. All are measured by
    GPUStarvationCallback. Takes about a minute on two idle CPUs.
    """
    from lightning_feed.demo import demo_text, run_demo

    outcome = run_demo(data=arguments.data, out=arguments.out)
    _print_result(arguments, outcome, demo_text(outcome))


def _pack(arguments: argparse.Namespace) -> None:
    """Pack a folder of many small files into a few large ones.

    Pack SOURCE, a folder of class folders (with train, val, test around them or not), into DEST. If interrupted, run
    it again: packing restarts. ImageFolderDataModule and PackedDataset read the pack.
    """
    from lightning_feed.storage import pack

    done = pack(
        arguments.source,
        arguments.dest,
        format=arguments.format,
        short_side=arguments.size,
        decoded=arguments.decoded,
        on_error=arguments.on_error,
        force=arguments.force,
        verify=arguments.verify,
    )
    for problem in done.skipped:
        _print(f"left out: {printable(problem)}", sys.stderr)
    verified = ", verified" if arguments.verify else ""
    path = printable(str(done.path))
    text = f"{path}: {done.samples} samples, {done.total_bytes / 1e6:.1f} MB, {done.took_s:.1f} s{verified}"
    _print_result(arguments, dataclasses.asdict(done), text)


def _stage(arguments: argparse.Namespace) -> None:
    """Copy data to memory or a local disk, unless the copy there is up to date.

    Copy SOURCE to DEST/<name of SOURCE>, whole or not at all. A copy of files that have changed since is replaced. Only
    you can open the copy. No root is needed: /dev/shm/<user>, or any folder of yours.
    """
    from lightning_feed.machine.file_system import mount_command
    from lightning_feed.storage.staging import stage

    done = stage(arguments.source, arguments.dest)
    copied = "copied" if done.copied else "up to date"
    path = printable(str(done.path))
    text = f"{path}: {done.files} files, {done.total_bytes / 1e6:.1f} MB, {copied}, {done.took_s:.1f} s"
    if not done.in_memory:
        mount = mount_command("/mnt/ram", done.total_bytes)
        text += f"\nThis copy is on a disk. For one in memory, mount a tmpfs and stage to it:\n  {mount}"
    _print_result(arguments, dataclasses.asdict(done), text)


# --- report, compare, doctor --------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace) -> None:
    """Show the report of a run.

    Show the feed_report.json of a run.
    """
    from lightning_feed.report.document import as_json, read_document

    report = read_document(arguments.folder)
    if arguments.folder.is_dir():
        _say(f"{report.path}, written {report.written_at}")
    if arguments.json:
        _print(as_json(report).removesuffix("\n"))
    else:
        _print(_as_text(report))


def _as_text(report: "Report", arguments: str | None = None) -> str:
    from lightning_feed.report.files import as_text
    from lightning_feed.report.next_step import ARGUMENTS

    return as_text(report.diagnosis, report.run, arguments=arguments or ARGUMENTS)


def _compare(arguments: argparse.Namespace) -> None:
    """Compare two reports: what changed, and how many times as fast the later run was.

    Compare the reports of two runs, the earlier first.
    """
    from lightning_feed.report.compare import compare, comparison_text
    from lightning_feed.report.document import read_document, to_plain

    comparison = compare(read_document(arguments.before), read_document(arguments.after))
    _print_result(arguments, to_plain(comparison), comparison_text(comparison))


def _doctor(arguments: argparse.Namespace) -> None:
    """Look at the machine and the environment: what would keep a GPU from being fed.

    Versions, GPUs and driver, CPUs, memory, /dev/shm, open files: what each is, and what to do if it is wrong. Nothing
    is changed.
    """
    from lightning_feed.doctor import as_text, examine
    from lightning_feed.report.document import to_plain

    findings = examine()
    document = {"schema": "lightning_feed.doctor/1", "findings": to_plain(findings)}
    _print_result(arguments, document, as_text(findings))


# --- diagnose, tune -----------------------------------------------------------------------------------------------


def _diagnose(arguments: argparse.Namespace) -> None:
    """Find what limits training by experiments.

    Run SCRIPT.py, or a module, with ARGS until it calls Trainer.fit. Then train for some seconds in place of that call,
    and change one part of the pipeline at a time. The rest of the program is not run. Takes about 90 s.
    """
    from lightning_feed.diagnosing import diagnose
    from lightning_feed.diagnosing.failures import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten
    from lightning_feed.diagnosing.run import EXPERIMENTS
    from lightning_feed.report.document import as_json, make_report, read_document
    from lightning_feed.report.files import check_writable
    from lightning_feed.report.report import arguments_now

    check_writable(arguments.out)  # before a program is run for minutes
    out = arguments.out.absolute()  # a program may change the current folder
    only = arguments.only or EXPERIMENTS

    def run(fit: "Fit") -> None:
        stop = None
        try:
            diagnosis = diagnose(
                fit.trainer,
                fit.model,
                fit.datamodule,
                train_dataloaders=fit.train_dataloaders,
                quick=arguments.quick,
                only=only,
                out=out,
            )
        except (DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten) as error:  # raised below
            stop = error
            diagnosis = error.diagnosis
        report = make_report(diagnosis)
        if arguments.json:
            _print(as_json(report).removesuffix("\n"))
        else:
            _print(_as_text(report, arguments_now()))
        if stop is None:
            newest = read_document(out).path or out
            _print(f"Written to {arguments.out / newest.stem}.html, .json and .md.", sys.stderr)
        elif stop.written:
            _say(f"what was measured until then is in {arguments.out}")
        if fit.ended:
            _say(fit.ended)
        if stop is not None:
            raise stop

    _with_fit(arguments, run)


def _tune(arguments: argparse.Namespace) -> None:
    """Find num_workers and the other loader settings, by a few trials.

    The program is given as for diagnose. Finds the fewest workers with which training steps are nearly as short as with
    the best setting. Takes about 30 s. The result is remembered.
    """
    from lightning_feed.diagnosing.tune import run_tune, tuned_document, tuned_text, write_plot
    from lightning_feed.extras import require

    plot = arguments.plot
    if plot is not None:
        plot = plot.absolute()  # a program may change the current folder
        if not arguments.sweep:
            raise SettingsError("--plot draws a sweep, but there is none. Add --sweep, or leave --plot out.")
        require("matplotlib", extra="plot", why="--plot")  # before a minute is spent on trials

    def run(fit: "Fit") -> None:
        tuned, sweep, loader_code = run_tune(fit, fresh=arguments.fresh, grid=arguments.sweep, loader=arguments.loader)
        document = tuned_document(tuned, loader_code)
        text = tuned_text(tuned, loader_code)
        if sweep is not None:
            document["sweep"] = sweep.to_dict()
            text += f"\n\n{sweep.text()}"
        _print_result(arguments, document, text)
        if sweep is not None and plot is not None:
            _print(f"Drawn into {write_plot(sweep, plot)}.", sys.stderr)
        if fit.ended:
            _say(fit.ended)

    _with_fit(arguments, run)


def _with_fit(arguments: argparse.Namespace, run: "Callable[[Fit], None]") -> None:
    """Call ``run`` with the first fit of the program, and end the process there."""
    from lightning_feed.diagnosing import program

    name = arguments.module or arguments.script
    named = program.Program(name, tuple(arguments.program_arguments), is_module=arguments.script is None)
    program.run_until_fit(named, lambda fit: _run(partial(run, fit)))


# --- the options of each command ----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands. shtab reads it, too, for shell completion."""
    parser = argparse.ArgumentParser(prog="lightning-feed", description="Keep the GPU fed in PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-feed {__version__}")
    parser.set_defaults(run=lambda _: parser.exit(2, parser.format_help()))  # without a command
    commands = parser.add_subparsers(metavar="COMMAND")

    demo = _command(commands, _demo)
    demo.add_argument("--data", type=Path, metavar="DIR", help="a folder of class folders (default: make images)")
    demo.add_argument("--out", type=Path, default=Path("feed_demo"), metavar="DIR", help="default: feed_demo")

    pack = _command(commands, _pack)
    pack.add_argument("source", metavar="SOURCE", help="a folder of class folders")
    pack.add_argument("dest", type=Path, metavar="DEST", help="the pack to write")
    pack.add_argument("--format", choices=("flat", "lmdb", "hdf5"), default="flat", help="default: flat")
    pack.add_argument("--size", type=int, metavar="PX", help="resize larger images once, to this shorter side")
    pack.add_argument("--decoded", action="store_true", help="store decoded pixels in place of files")
    pack.add_argument("--on-error", choices=("raise", "skip"), default="raise", help="for images that cannot be read")
    pack.add_argument("--force", action="store_true", help="replace an existing pack")
    pack.add_argument("--verify", action="store_true", help="read everything back and compare checksums")

    stage = _command(commands, _stage)
    stage.add_argument("source", metavar="SOURCE", help="a folder or a file, or its URL (s3://...)")
    stage.add_argument(
        "dest", type=Path, metavar="DEST", help="a folder in memory (/dev/shm/<user>) or on a local disk"
    )

    report = _command(commands, _report)
    report.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, or its feed_report.json")

    compare = _command(commands, _compare)
    compare.add_argument("before", type=Path, metavar="A", help="the earlier run's folder, or its feed_report.json")
    compare.add_argument("after", type=Path, metavar="B", help="the later run's")

    diagnose = _command(commands, _diagnose, program=True)
    diagnose.add_argument("--quick", action="store_true", help="a third of the time, figures less certain")
    diagnose.add_argument("--only", type=_names, metavar="LIST", help="experiments to run, such as model,loader")
    diagnose.add_argument(
        "--out", type=Path, default=Path("feed_diagnosis"), metavar="DIR", help="default: feed_diagnosis"
    )

    tune = _command(commands, _tune, program=True)
    tune.add_argument("--loader", metavar="NAME", help="key or number of the loader, if there are several")
    tune.add_argument("--fresh", action="store_true", help="ignore remembered results")
    tune.add_argument(
        "--sweep",
        type=_workers_grid,
        nargs="?",
        default=(),
        const=tuple(range(0, 51, 5)),
        metavar="LIST",
        help="try a whole grid of workers too (default LIST: 0,5,10,...,50)",
    )
    tune.add_argument("--plot", type=Path, metavar="FILE", help="draw the sweep into this PNG file")

    _command(commands, _doctor)
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    run: Callable[[argparse.Namespace], None],
    *,
    program: bool = False,
) -> argparse.ArgumentParser:
    """Add a command. Name and description come from the function that runs it, and from its docstring.

    Args:
        commands: the commands of the parser.
        run: the function.
        program: True for a command that takes the user's program.
    """
    name = run.__name__.strip("_")
    summary, _, description = inspect.cleandoc(run.__doc__ or "").partition("\n\n")
    command = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    if program:
        command.usage = f"lightning-feed {name} [options] (SCRIPT.py | -m MODULE) [-- ARGS]"
        either = command.add_mutually_exclusive_group(required=True)
        either.add_argument("script", nargs="?", metavar="SCRIPT.py", help="your program")
        either.add_argument("-m", dest="module", metavar="MODULE", help="your program, as for python -m")
    return command


def _names(text: str) -> tuple[str, ...]:
    """Read names from the command line."""
    return tuple(name.strip() for name in text.split(","))


def _workers_grid(text: str) -> tuple[int, ...]:
    """Read numbers of workers from the command line."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 0,2,4,8") from None
