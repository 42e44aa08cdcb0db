"""The stack of a worker process, asked for by a signal.

``faulthandler`` writes it in C: also where the worker hangs in C and no Python runs in it. The signal is a real-time
one that nobody uses, and is sent only to a process that waits for it, so handlers of the user's are left alone. The
worker keeps a file in memory, which its parent finds under /proc: nothing has to be handed to the worker, so that it is
the same for workers that are forked and spawned. Where there is no /proc (macOS), or a process does not answer because
the kernel holds it, there is no stack.
"""

import faulthandler
import os
import signal
import time
from pathlib import Path

from torch.utils.data import get_worker_info

_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7
_FILE = "lightning_feed_stack"
_LOOK_S = 0.02
_LOOKS = 50


def answer() -> None:
    """Let this worker process write its stack when it is asked. Does nothing elsewhere, and where it cannot."""
    create = getattr(os, "memfd_create", None)
    if create is None or get_worker_info() is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return
    try:
        faulthandler.register(_SIGNAL, file=create(_FILE), all_threads=True)
    except OSError:
        return  # out of descriptors: its work goes first


def stack_of(pid: int) -> str:
    """The stacks of a worker's threads, innermost call first; or what the kernel says of it, where it does not answer.

    Takes up to a second.
    """
    place = Path("/proc") / str(pid)
    try:
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        files = [file for file in (place / "fd").iterdir() if _FILE in file.readlink().name]
        if files and int(status["SigCgt"], 16) >> (_SIGNAL - 1) & 1:
            before, said = len(files[0].read_bytes()), b""
            os.kill(pid, _SIGNAL)
            for _ in range(_LOOKS):
                time.sleep(_LOOK_S)
                last, said = said, files[0].read_bytes()[before:]
                if said and said == last:
                    return said.decode(errors="replace").strip()
        return f"(it cannot be had; the kernel says of the process: {status['State'].strip()})"
    except (OSError, ValueError, KeyError) as error:
        return f"(it cannot be had: {type(error).__name__})"
