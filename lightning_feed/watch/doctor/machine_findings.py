"""CPUs, memory, shared memory, limits: what the machine and its container leave to this process."""

from collections.abc import Iterator

from lightning_feed.archive.memory import memory_limits, read_text
from lightning_feed.archive.stage_room import size_text
from lightning_feed.load.machine import read_machine
from lightning_feed.watch.doctor.finding import NOT_KNOWN, Finding
from lightning_feed.watch.doctor.sources import Sources

BATCH_BYTES = 64 * 3 * 224 * 224 * 4
"""64 pictures of 224 x 224 in float32, 38.5 MB: the batch by which /dev/shm is judged."""
BATCHES_PER_WORKER = 2
"""DataLoader's prefetch_factor where none is given."""
LITTLE_MEMORY_BYTES = 2 << 30
MUCH_SWAP_BYTES = 256 << 20
FEW_FILES = 1024
UNLIMITED = -1
NOT_THE_FULL_CLOCK = {"powersave", "conservative"}
SCALES_BY_ITSELF = {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}
"""Under these drivers ``powersave`` is the usual name and raises the clock under load (kernel, pm/intel_pstate)."""


def cpus(sources: Sources) -> Iterator[Finding]:
    """CPUs that workers can keep busy, and the limit that says so."""
    machine = read_machine(sources.root)
    few = machine.usable_cpus < 2
    yield Finding(
        topic="CPUs",
        value=f"{machine.usable_cpus} usable",
        level="warning" if few else "ok",
        meaning=machine.cpu_reason + ("; loading and training share one CPU" if few else ""),
        do="Give the process or its container more CPUs." if few else "",
    )
    method = machine.start_method
    yield Finding(
        topic="workers start",
        value=method,
        meaning="" if method == "fork" else "each worker imports the program anew; keep them (persistent_workers)",
    )


def memory(sources: Sources) -> Iterator[Finding]:
    """Memory that can be taken, and what was moved out to swap."""
    limits = list(memory_limits(sources.root))
    if limits:
        left, reason = min(limits)
        little = left < LITTLE_MEMORY_BYTES
        yield Finding(
            topic="memory",
            value=f"{size_text(max(0, left))} available",
            level="warning" if little else "ok",
            meaning=reason + ("; workers or a cache may be killed" if little else ""),
            do="Use fewer workers or none that copy the dataset, or raise the limit." if little else "",
        )
    else:
        yield Finding(topic="memory", value=NOT_KNOWN, level="note", meaning="neither /proc/meminfo nor a cgroup tells")
    yield _swap(sources)


def _swap(sources: Sources) -> Finding:
    words: dict[str, str] = {}
    for line in read_text(sources.root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words[name] = value.split()[0] if value.split() else ""
    total, free = words.get("SwapTotal", ""), words.get("SwapFree", "")
    if not total.isdigit() or not free.isdigit():
        return Finding(topic="swap", value=NOT_KNOWN, level="note", meaning="/proc/meminfo does not tell")
    if int(total) == 0:
        return Finding(topic="swap", value="none")
    used = (int(total) - int(free)) * 1024
    much = used >= MUCH_SWAP_BYTES
    return Finding(
        topic="swap",
        value=f"{size_text(used)} of {size_text(int(total) * 1024)} used",
        level="warning" if much else "ok",
        meaning="memory ran short at some time; samples read back from swap are slow" if much else "",
        do="Free memory: fewer workers, a smaller cache, fewer other programs." if much else "",
    )


def shared_memory(sources: Sources) -> Iterator[Finding]:
    """/dev/shm, through which workers hand over their batches."""
    try:
        size, free = sources.space(sources.root / "dev/shm")
    except OSError as error:
        yield Finding(topic="/dev/shm", value=NOT_KNOWN, level="note", meaning=f"{error}")
        return
    batches = free // BATCH_BYTES
    wanted = read_machine(sources.root).usable_cpus * BATCHES_PER_WORKER
    value = f"{size_text(free)} free of {size_text(size)}"
    room = f"room for {batches} batches of 64 x 3 x 224 x 224 float32"
    if batches >= wanted:
        yield Finding(topic="/dev/shm", value=value, meaning=room)
        return
    yield Finding(
        topic="/dev/shm",
        value=value,
        level="problem" if batches < BATCHES_PER_WORKER else "warning",
        meaning=f"{room}; one worker for each CPU wants {wanted}, and dies with a bus error when it is full",
        do="Docker: --shm-size=8g or --ipc=host. Kubernetes: an emptyDir with medium: Memory at /dev/shm.",
    )


def limits(sources: Sources) -> Iterator[Finding]:
    """How many files may be open."""
    soft, hard = sources.limit("RLIMIT_NOFILE")
    few = soft != UNLIMITED and soft < FEW_FILES
    yield Finding(
        topic="open files",
        value=f"{_count(soft)} (may be raised to {_count(hard)})",
        level="warning" if few else "ok",
        meaning="each tensor that a worker hands over keeps a file open: Too many open files" if few else "",
        do=f"ulimit -n {65536 if hard == UNLIMITED else min(hard, 65536)}; above that, raise the hard limit, or "
        'torch.multiprocessing.set_sharing_strategy("file_system").'
        if few
        else "",
    )


def clock(sources: Sources) -> Iterator[Finding]:
    """The frequency governor, where one can be seen."""
    folder = sources.root / "sys/devices/system/cpu/cpu0/cpufreq"
    governor, driver = read_text(folder / "scaling_governor"), read_text(folder / "scaling_driver")
    if not governor:
        yield Finding(
            topic="CPU clock",
            value=NOT_KNOWN,
            level="note",
            meaning="no governor is shown, as in most virtual machines",
        )
        return
    slow = governor in NOT_THE_FULL_CLOCK and driver not in SCALES_BY_ITSELF
    yield Finding(
        topic="CPU clock",
        value=f"governor {governor}",
        level="warning" if slow else "ok",
        meaning="the CPUs may stay below their full clock while they decode" if slow else "",
        do="sudo cpupower frequency-set -g performance" if slow else "",
    )


def container(sources: Sources) -> Iterator[Finding]:
    """Whether this runs in a container: its limits are changed where it is started."""
    first = read_text(sources.root / "proc/1/cgroup")
    signs = {
        "/.dockerenv": (sources.root / ".dockerenv").exists(),
        "/run/.containerenv": (sources.root / "run/.containerenv").exists(),
        "the variable container": bool(sources.environ.get("container")),
        "KUBERNETES_SERVICE_HOST": bool(sources.environ.get("KUBERNETES_SERVICE_HOST")),
        "/proc/1/cgroup": any(word in first for word in ("docker", "kubepods", "containerd", "lxc")),
    }
    seen = [sign for sign, there in signs.items() if there]
    yield Finding(
        topic="container",
        value="yes" if seen else "none seen",
        meaning=f"by {seen[0]}; CPUs, memory and /dev/shm are set where it is started" if seen else "",
    )


def _count(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)
