"""The ``lightning-feed`` command: arguments, exit codes and printing, nothing else.

Exit codes: 0 done, 1 a FeedError (its message on stderr), 2 wrong usage, 130 stopped with Ctrl-C.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_feed import __version__
from lightning_feed.errors import FeedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; None takes those of the process.
    """
    arguments = _parser().parse_args(argv)
    try:
        # Each command imports what it needs itself: Lightning takes seconds, and --help should not.
        arguments.run(arguments)
    except FeedError as error:
        print(f"lightning-feed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lightning-feed: stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-feed", description="Keep the GPU fed in PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-feed {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a small ResNet-18 on real JPEGs, first as most people write it, then fed; show both reports",
        description="Train torchvision's ResNet-18 on small pictures twice: with a plain DataLoader, then with "
        "FastDataModule, PrefetchCallback and GPUStarvationCallback. Both runs are measured in the same way.",
    )
    demo.add_argument("--data", type=Path, metavar="DIR", help="a folder of class folders (default: make pictures)")
    demo.add_argument(
        "--images", type=int, default=3000, metavar="N", help="pictures to make, or to take from DIR (default: 3000)"
    )
    demo.add_argument("--epochs", type=int, default=2, metavar="N", help="epochs of each run (default: 2)")
    demo.add_argument("--out", type=Path, default=Path("feed_demo"), metavar="DIR", help="default: feed_demo")
    demo.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    demo.set_defaults(run=_demo)
    _add_pack(commands)
    _add_stage(commands)
    return parser


def _add_pack(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pack = commands.add_parser(
        "pack",
        help="pack a folder of many small files into a few large ones",
        description="Pack SRC, a folder of class folders (with train, val, test around them or not), into DEST. Run "
        "again after a kill, it goes on where it was. ImageFolderDataModule and PackedDataset read the pack.",
    )
    pack.add_argument("source", type=Path, metavar="SRC", help="a folder of class folders")
    pack.add_argument("dest", type=Path, metavar="DEST", help="where the pack is to be")
    pack.add_argument("--format", choices=("lmdb", "hdf5", "litdata"), default="lmdb", help="default: lmdb")
    pack.add_argument("--short-side", type=int, metavar="PX", help="resize larger images once, to this shorter side")
    pack.add_argument("--quality", type=int, metavar="Q", help="of JPEGs that are written anew: those that --short-side makes smaller (default: 95), or all")
    pack.add_argument("--decoded", action="store_true", help="store decoded pixels in place of files")
    pack.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each CPU)")
    pack.add_argument("--on-error", choices=("raise", "skip"), default="raise", help="for images that cannot be read")
    pack.add_argument("--force", action="store_true", help="replace a pack that is there")
    pack.add_argument("--verify", action="store_true", help="read everything back and compare checksums")
    pack.add_argument("--json", action="store_true", help="print what was done as JSON")
    pack.set_defaults(run=_pack)


def _add_stage(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    stage = commands.add_parser(
        "stage",
        help="copy data to memory or a local disk, or bring the copy there up to date",
        description="Copy SRC to DEST/<name of SRC>. Only files that are new or have changed are copied; a copy that "
        "was broken off is gone on with. No root is needed: /dev/shm, or any folder.",
    )
    stage.add_argument("source", type=Path, metavar="SRC", help="a folder or a file")
    stage.add_argument("dest", type=Path, metavar="DEST", help="a folder in memory (/dev/shm/me) or on a local disk")
    stage.add_argument("--hash", action="store_true", help="compare the contents of all files too, byte by byte")
    stage.add_argument("--force", action="store_true", help="remove what lies there and copy everything")
    stage.add_argument("--wait", type=float, metavar="S", help="seconds to wait for another process that copies")
    stage.add_argument("--remove", action="store_true", help="remove the copy instead")
    stage.add_argument("--json", action="store_true", help="print what was done as JSON")
    stage.set_defaults(run=_stage)


def _demo(arguments: argparse.Namespace) -> None:
    from lightning_feed.demo import run_demo

    outcome = run_demo(data=arguments.data, images=arguments.images, epochs=arguments.epochs, out=arguments.out)
    print(outcome.as_json() if arguments.json else outcome.as_text())


def _pack(arguments: argparse.Namespace) -> None:
    from lightning_feed.archive import pack

    done = pack(
        arguments.source,
        arguments.dest,
        format=arguments.format,
        short_side=arguments.short_side,
        quality=arguments.quality,
        decoded=arguments.decoded,
        workers=arguments.workers,
        on_error=arguments.on_error,
        force=arguments.force,
        verify=arguments.verify,
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(done), default=str, indent=2))
        return
    for problem in done.skipped:
        print(f"left out: {problem}", file=sys.stderr)
    verified = ", verified" if arguments.verify else ""
    print(f"{done.path}: {done.samples} samples, {done.total_bytes / 1e6:.1f} MB, {done.took_s:.1f} s{verified}")


def _stage(arguments: argparse.Namespace) -> None:
    from lightning_feed.archive import mount_command, stage, unstage

    if arguments.remove:
        removed = unstage(arguments.source, arguments.dest)
        print(json.dumps({"removed": removed}) if arguments.json else "Removed." if removed else "There is no copy.")
        return
    done = stage(arguments.source, arguments.dest, hash=arguments.hash, force=arguments.force, wait_s=arguments.wait)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(done), default=str, indent=2))
        return
    print(f"{done.path}: {done.files} files, {done.total_bytes / 1e6:.1f} MB", end="; ")
    print(f"{done.copied_files} copied ({done.copied_bytes / 1e6:.1f} MB), {done.removed} removed, {done.took_s:.1f} s")
    if not done.in_memory:
        print("This copy is on a disk. For one in memory, mount a tmpfs of the right size and stage to it:")
        print(f"  {mount_command('/mnt/ram', done.total_bytes)}")
