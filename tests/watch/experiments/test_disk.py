"""Where files lie, by a fake /proc and /sys; and what workers read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_feed.watch.experiments.disk import disk_facts, file_system
from lightning_feed.watch.experiments.reads import ReadMarks, Reads

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /dev/shm rw - tmpfs shm rw
24 22 0:44 / /far rw shared:3 master:4 - nfs4 server:/data rw,vers=4.2
25 22 253:0 / /data rw - xfs /dev/mapper/vg-data rw
26 22 259:2 / /fast rw - xfs /dev/nvme0n1p2 rw
27 22 0:60 / /bucket rw - fuse.gcsfuse bucket rw
28 22 0:61 / /share/with\040space rw - lustre 10.0.0.1@tcp:/fs rw
29 22 0:62 / /layers rw - overlay overlay rw
30 22 0:63 / /pool rw - btrfs /dev/sdb1 rw
31 26 0:64 / /fast rw - cifs //server/share rw
32 22 7:0 / /loop rw - ext4 /dev/loop0 rw
33 22 0:70 / /ntfs rw - fuseblk /dev/sda1 rw
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with a rotating disk sda (and sdb), an NVMe disk, and a volume over both."""
    root = tmp_path / "machine"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(MOUNTS.strip() + "\nbroken line\n")
    devices = root / "sys/devices"
    for disk, partition, rotational in (("sda", "sda1", 1), ("sdb", "sdb1", 1), ("nvme0n1", "nvme0n1p2", 0)):
        (devices / disk / "queue").mkdir(parents=True)
        (devices / disk / "queue/rotational").write_text(f"{rotational}\n")
        (devices / disk / partition).mkdir()
    (devices / "dm-0/queue").mkdir(parents=True)
    (devices / "dm-0/queue/rotational").write_text("0\n")
    (devices / "dm-0/slaves").mkdir()
    (devices / "dm-0/slaves/sda1").symlink_to(devices / "sda/sda1")
    for folder, links in (
        ("dev/block", {"8:1": "sda/sda1", "259:2": "nvme0n1/nvme0n1p2", "253:0": "dm-0"}),
        ("class/block", {"sda1": "sda/sda1", "sdb1": "sdb/sdb1"}),
    ):
        (root / "sys" / folder).mkdir(parents=True)
        for name, target in links.items():
            (root / "sys" / folder / name).symlink_to(devices / target)
    return root


@pytest.mark.parametrize(
    ("path", "system", "kind"),
    [
        ("/pictures/a.jpg", "ext4", "rotational"),
        ("/dev/shm/a.jpg", "tmpfs", "memory"),
        ("/far/a.jpg", "nfs4", "network"),
        ("/far-not/a.jpg", "ext4", "rotational"),
        ("/data/a.jpg", "xfs", "rotational"),  # a volume of which one disk rotates
        ("/bucket/a.jpg", "fuse.gcsfuse", "network"),
        ("/share/with space/a.jpg", "lustre", "network"),
        ("/layers/a.jpg", "overlay", "overlay"),
        ("/pool/a.jpg", "btrfs", "rotational"),  # by the name of its device: its number is made up
        ("/fast/a.jpg", "cifs", "network"),  # mounted over the other
        ("/loop/a.jpg", "ext4", "local"),
        ("/ntfs/a.jpg", "fuseblk", "rotational"),
    ],
)
def test_file_systems(machine: Path, path: str, system: str, kind: str) -> None:
    assert file_system(path, machine) == (system, kind)


def test_a_fast_disk_is_local(machine: Path) -> None:
    mounts = machine / "proc/self/mountinfo"
    mounts.write_text("26 22 259:2 / / rw - xfs /dev/nvme0n1p2 rw\n")
    assert file_system("/a", machine) == ("xfs", "local")


@pytest.mark.parametrize("place", ["pci0000:00/virtio2/block/vda", "vbd-51712/block/xvda"])
def test_a_disk_of_a_virtual_machine_is_not_taken_to_rotate(machine: Path, place: str) -> None:
    disk = machine / "sys/devices" / place
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/rotational").write_text("1\n")  # Linux says so of all of them
    (machine / "sys/dev/block/254:0").symlink_to(disk)
    (machine / "proc/self/mountinfo").write_text("26 22 254:0 / / rw - ext4 /dev/root rw\n")
    assert file_system("/a", machine) == ("ext4", "local")


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    assert file_system("/pictures/a", tmp_path) == (None, None)
    facts = disk_facts(["/a"], [100, 300], reads=None, files_per_s=None, root=tmp_path)
    assert (facts.file_system, facts.kind, facts.mean_file_bytes) == (None, None, 200)
    assert (facts.read_mb_per_s, facts.files_per_s, facts.page_cache_pct) == (None, None, None)


def test_facts(machine: Path) -> None:
    reads = Reads(batches=10, elapsed_s=2.0, asked_bytes=8_000_000, disk_bytes=2_000_000)
    facts = disk_facts(["/far/a"], [1000, 3000], reads=reads, files_per_s=50.0, root=machine)
    assert (facts.file_system, facts.kind) == ("nfs4", "network")
    assert (facts.read_mb_per_s, facts.files_per_s, facts.mean_file_bytes) == (4.0, 50.0, 2000.0)
    assert facts.page_cache_pct == 75.0
    facts = disk_facts(["/a"], [1000, 3000], reads=None, files_per_s=50.0, root=machine)
    assert facts.read_mb_per_s == pytest.approx(0.1)


def test_mapped_files_have_no_page_cache_share() -> None:
    assert Reads(batches=1, elapsed_s=1.0, asked_bytes=10, disk_bytes=4096).page_cache_pct is None
    assert Reads(batches=1, elapsed_s=1.0, asked_bytes=0, disk_bytes=0).page_cache_pct is None
    assert Reads(batches=1, elapsed_s=1.0, asked_bytes=10, disk_bytes=0).page_cache_pct == 100.0


class Passes:
    def __init__(self, *pids: int) -> None:
        self.iterators = [SimpleNamespace(_workers=[SimpleNamespace(pid=pid) for pid in pids])]
        self.came = 0


def _io(root: Path, pid: int, asked: int, disk: int) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "io").write_text(f"rchar: {asked}\nwchar: 5\nsyscr: 1\nread_bytes: {disk}\nwrite_bytes: 0\n")


def test_reads_are_counted_after_warm_up_over_all_workers(tmp_path: Path) -> None:
    times = iter([10.0, 12.0, 15.0, 20.0])
    marks: Any = ReadMarks(first=4, every=2, root=tmp_path, clock=lambda: next(times))
    passes = Passes(71, 72)
    for came in range(1, 9):
        passes.came = came
        _io(tmp_path, 71, 1000 * came, 100 * came)
        _io(tmp_path, 72, 5000, 7)
        marks(passes)
    assert marks.result() == Reads(batches=4, elapsed_s=5.0, asked_bytes=4000, disk_bytes=400)


def test_without_counts_there_are_no_reads(tmp_path: Path) -> None:
    marks: Any = ReadMarks(first=0, every=1, root=tmp_path)
    passes = Passes(71)
    marks(passes)
    passes.came = 5
    marks(passes)
    assert marks.result() is None
    _io(tmp_path, 71, 10, 10)
    marks(passes)
    assert marks.result() is None  # one mark is no difference


def test_a_new_pass_has_new_workers(tmp_path: Path) -> None:
    marks: Any = ReadMarks(first=0, every=1, root=tmp_path, clock=lambda: 1.0)
    _io(tmp_path, 71, 9_000, 9_000)
    first = Passes(71)
    marks(first)
    second = Passes(72)
    for came, asked in ((1, 10), (2, 30)):
        second.came = came
        _io(tmp_path, 72, asked, 0)
        marks(second)
    result = marks.result()
    assert result is not None
    assert (result.batches, result.asked_bytes) == (1, 20)
