"""The ``lightning-feed`` command: arguments, exit codes and printing, nothing else.

Exit codes: 0 done, 1 a FeedError (its message on stderr), 2 wrong usage, 130 stopped with Ctrl-C.
"""

import argparse
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
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    from lightning_feed.demo import run_demo

    outcome = run_demo(data=arguments.data, images=arguments.images, epochs=arguments.epochs, out=arguments.out)
    print(outcome.as_json() if arguments.json else outcome.as_text())
