"""Room for a copy, and what to know of it, read from made-up file systems."""

from pathlib import Path

import pytest

from lightning_feed.errors import ArchiveError
from lightning_feed.machine.file_system import check_room, find_caveats, find_mount, mount_command

GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my disk"
    path.mkdir()
    return path


def made_up(root: Path, folder: Path, *, kind: str = "tmpfs", options: str = "rw", **files: str) -> Path:
    point = str(folder).replace(" ", "\\040")
    mounts = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / {point} rw shared:1 - {kind} {kind} {options}\n"
    texts = {"proc/self/mountinfo": mounts, "proc/meminfo": f"MemAvailable: {100 * 2**20} kB\n", **files}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limited(version: int) -> dict[str, str]:
    """Files of a cgroup that leaves 2 GiB: a limit of 5, a usage of 4 of which 1 is page cache."""
    if version == 2:
        names, prefix, own = ("memory.max", "memory.current"), "", "0::/\n"
        base = "sys/fs/cgroup"
    else:
        names, prefix, own = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_", "4:memory:/\n"
        base = "sys/fs/cgroup/memory"
    values = {names[0]: f"{5 * GIB}", names[1]: f"{4 * GIB}", "memory.stat": f"{prefix}inactive_file {GIB}\n"}
    return {"proc/self/cgroup": own, **{f"{base}/{name}": value for name, value in values.items()}}


def test_the_deepest_mount_is_found_even_with_spaces_in_its_path(tmp_path: Path, folder: Path) -> None:
    root = made_up(tmp_path / "root", folder)
    found = find_mount(str(folder), root)
    assert found is not None
    assert (found.point, found.in_memory) == (str(folder), True)
    outside = find_mount("/", root)
    assert outside is not None
    assert (outside.kind, outside.in_memory) == ("ext4", False)
    assert find_mount("/", tmp_path / "nothing") is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_cgroup_memory_limit_applies_to_tmpfs_only(tmp_path: Path, folder: Path, version: int) -> None:
    root = made_up(tmp_path / "root", folder, **limited(version))
    check_room(int(1.7 * GIB), 1, str(folder), root)
    with pytest.raises(ArchiveError, match=r"1\.9 GiB .*limit of the cgroup .* leaves 2\.0 GiB, of which 10%"):
        check_room(int(1.9 * GIB), 1, str(folder), root)
    check_room(
        int(1.9 * GIB),
        1,
        str(folder),
        made_up(tmp_path / "disk", folder, kind="ext4", **limited(version)),
    )


def test_the_available_memory_of_the_machine_limits_a_copy_to_tmpfs(tmp_path: Path, folder: Path) -> None:
    root = made_up(tmp_path / "root", folder, **{"proc/meminfo": f"MemAvailable: {2**20} kB\n"})
    with pytest.raises(ArchiveError, match=r"MemAvailable of the machine leaves 1\.0 GiB"):
        check_room(GIB, 1, str(folder), root)


def test_only_caveats_that_apply_are_listed(tmp_path: Path, folder: Path) -> None:
    swap = {"proc/swaps": "Filename\tType\n/dev/sdb\tpartition\n"}
    assert find_caveats(str(folder), made_up(tmp_path / "disk", folder, kind="ext4", **swap)) == ()
    (reboot,) = find_caveats(str(folder), made_up(tmp_path / "plain", folder))
    assert "gone after a reboot" in reboot
    _, swapped, counted = find_caveats(str(folder), made_up(tmp_path / "all", folder, **swap, **limited(2)))
    assert "swap" in swapped
    assert "2.0 GiB" in counted
    assert len(find_caveats(str(folder), made_up(tmp_path / "noswap", folder, options="rw,noswap", **swap))) == 1


@pytest.mark.parametrize(("release", "noswap"), [("6.3.9", False), ("6.4.0-x", True), ("6.18.1", True)])
def test_the_suggested_mount_command_has_room_for_the_requested_bytes(
    tmp_path: Path, folder: Path, release: str, noswap: bool
) -> None:
    swap = {"proc/swaps": "Filename\n/dev/sdb\n", "proc/sys/kernel/osrelease": release}
    command = mount_command(folder, 10 * GIB, made_up(tmp_path / "root", folder, **swap))
    size = int(command.split("size=")[1].split("M")[0])
    assert size * 0.9 > 10 * 1024
    assert command.endswith(f"tmpfs '{folder}'")
    assert ("noswap" in command) is noswap
