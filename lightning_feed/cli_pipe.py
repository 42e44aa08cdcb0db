"""When the program that reads the output has ended: ``lightning-feed report RUN | head -2``."""

import io
import os
import select
import sys
from typing import TextIO


def nobody_reads() -> bool:
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
