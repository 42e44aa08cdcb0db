"""CPU time of processes that were killed, which the kernel then gives to nobody."""

from contextlib import suppress
from pathlib import Path

_noted_ticks = 0


def killed_ticks() -> int:
    """Return the clock ticks of CPU time of all processes that :func:`note_ticks` has noted.

    The kernel adds the time of a process to that of its parent only if the parent waits for it (getrusage(2)).
    """
    return _noted_ticks


def note_ticks(leader: int, proc: Path = Path("/proc")) -> None:
    """Note the CPU time of a process group that is about to be killed, but for that of its leader.

    Args:
        leader: the process whose group it is, for which this process waits.
        proc: the folder of processes (proc(5)).
    """
    global _noted_ticks  # of this process, as its children's time is
    for file in proc.glob("[0-9]*/stat"):
        with suppress(OSError):  # a process may end at any time
            # After the name, which may hold anything: state, parent, group, ... utime, stime, cutime, cstime.
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
            if fields[2] == str(leader) and file.parent.name != str(leader):
                _noted_ticks += sum(map(int, fields[11:15]))
