"""Staging beside other mounts, other users and planted files: the source stays, and what is wrong is said."""

import inspect
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_feed.cli import main
from lightning_feed.errors import ArchiveError
from lightning_feed.storage import stage, stage_copy, staging, unstage
from lightning_feed.storage.file_system import find_caveats
from lightning_feed.storage.staging import StagePlace, claimed, release

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user can be made by root alone")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "birds"
    for name in ("1.jpg", "val/2.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 100)
    return root


@pytest.fixture
def dest(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "fast"
    release(StagePlace(tmp_path / "fast/birds"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- the source under another name --------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("link", "leads_to"),
    [
        ("data/birds/more", "fast/birds/in"),
        ("data/birds/3.jpg", "fast/birds/in/3.jpg"),
        ("data/birds/up", "fast"),
        ("fast/birds", "data/birds"),
    ],
)
def test_a_source_that_leads_into_its_copy_by_links_is_refused(
    source: Path, tmp_path: Path, link: str, leads_to: str, force: bool
) -> None:
    (tmp_path / "fast/birds/in").mkdir(parents=True)
    (tmp_path / "fast/birds/in/3.jpg").write_bytes(b"kept")
    if link == "fast/birds":
        shutil.rmtree(tmp_path / link)
    (tmp_path / link).symlink_to(tmp_path / leads_to)
    given = tmp_path / link if link == "fast/birds" else source
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ArchiveError, match="one is inside the other") as caught:
        stage(given, tmp_path / "fast", force=force)
    assert "force" not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "fast/.birds.staging").exists()


REMOVED = """
import subprocess, sys
from pathlib import Path
from lightning_feed.storage import stage, unstage
from lightning_feed.storage.staging import StagePlace, leave, release
from lightning_feed.errors import ArchiveError

source, dest = map(Path, sys.argv[1:])
place = StagePlace(stage(source, dest, remove_at_exit=True).path)
release(place)
subprocess.run(["mount", "--bind", source, place.target], check=True)
leave(place)
print(place.target.exists())
try:
    unstage(source, dest)
except ArchiveError as error:
    print(error)
"""


def test_a_copy_whose_place_the_source_has_taken_is_not_removed(source: Path, dest: Path) -> None:
    command = ["unshare", "-m", sys.executable, "-c", REMOVED, str(source), str(dest)]
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mounting is not permitted here")
    before = contents(source)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "True"
    assert "birds itself" in done.stdout.splitlines()[1]
    assert contents(source) == before


# --- other users --------------------------------------------------------------------------------------------------


def test_a_copy_of_public_files_is_its_owners_alone(source: Path, dest: Path) -> None:
    source.chmod(0o755)
    (source / "1.jpg").chmod(0o644)
    copy = stage(source, dest).path
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    single = stage(source / "1.jpg", dest).path
    assert stat.S_IMODE(single.stat().st_mode) == 0o600
    copy.chmod(0o755)  # as an earlier version made it
    single.chmod(0o644)
    assert stage(source, dest).copied_files == stage(source / "1.jpg", dest).copied_files == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert stat.S_IMODE(single.stat().st_mode) == 0o600
    release(StagePlace(single))


def plant(folder: Path) -> None:
    """Another user's folder that all may write to."""
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o777)


@as_root
def test_a_folder_that_another_user_makes_after_the_check_is_not_written_to(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_room(*need: object) -> None:
        plant(dest / "birds")

    monkeypatch.setattr(stage_copy, "check_room", check_room)
    with pytest.raises(ArchiveError, match=r"birds belongs to another user\. Use .*/dev/shm/<user>\.$"):
        stage(source, dest)
    assert contents(dest / "birds") == {}


@as_root
@pytest.mark.parametrize("force", [False, True])
def test_another_users_folder_in_the_place_of_a_copy_that_was_removed(source: Path, dest: Path, force: bool) -> None:
    shutil.rmtree(stage(source, dest).path)
    plant(dest / "birds")
    (dest / "birds/theirs").write_bytes(b"theirs")
    with pytest.raises(ArchiveError, match="belongs to another user"):
        stage(source, dest, force=force)
    assert unstage(source, dest) is True
    assert contents(dest / "birds") == {"theirs": b"theirs"}


@as_root
def test_another_users_record_of_a_copy_is_not_believed(source: Path, dest: Path) -> None:
    place = StagePlace(stage(source, dest).path)
    assert place.read() is not None
    os.chown(place.record, NOBODY, NOBODY)
    assert place.read() is None
    place.record.unlink()
    os.mkfifo(place.record)
    assert place.read() is None
    os.chown(place.folder, NOBODY, NOBODY)
    assert place.read() is None
    with pytest.raises(ArchiveError, match="belongs to another user"):
        stage(source, dest)
    os.chown(place.folder, 0, 0)


@as_root
def test_a_dest_in_which_others_can_replace_the_copy_is_reported(tmp_path: Path) -> None:
    assert not any("Other users" in caveat for caveat in find_caveats(str(tmp_path)))
    tmp_path.chmod(0o777)
    assert "Other users can replace a copy" in find_caveats(str(tmp_path))[0]
    tmp_path.chmod(0o1777)
    assert not any("Other users" in caveat for caveat in find_caveats(str(tmp_path)))
    os.chown(tmp_path, NOBODY, NOBODY)
    assert "/dev/shm/<user>" in find_caveats(str(tmp_path))[0]
    os.chown(tmp_path, 0, 0)


# --- waiting ------------------------------------------------------------------------------------------------------


def test_a_wait_is_said_once_when_it_lasts(
    dest: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest.mkdir()
    place = StagePlace(dest / "birds")
    with claimed(place):
        with pytest.raises(ArchiveError, match=r"not complete after 0\.05 s"), claimed(place, wait_s=0.05):
            pass
        assert not caplog.records
        monkeypatch.setattr(staging, "_SAY_AFTER_S", 0.02)
        with pytest.raises(ArchiveError, match=r"by another process, .*after 0\.2 s"), claimed(place, wait_s=0.2):
            pass
    assert caplog.text.count("Waiting for the copy at") == 1
    assert caplog.records[0].levelname == "WARNING"  # which is seen where nobody has set up logging


def test_the_command_says_what_it_waits_for(source: Path, dest: Path) -> None:
    dest.mkdir()
    command = [sys.executable, "-m", "lightning_feed", "stage", str(source), str(dest)]
    with claimed(StagePlace(dest / "birds")):
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        assert "Waiting for the copy at" in waiting.stderr.readline()
    assert "2 copied" in waiting.communicate()[0]
    assert waiting.returncode == 0


# --- a DEST that cannot be --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", ["/proc", "n" * 300, "d/" * 2040, "dangling/deep", "loop", "loop/in", "file", "/dev/null"]
)
def test_an_impossible_dest_is_reported(
    source: Path, tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for option in ([], ["--force"], ["--remove"]):
        code = main(["stage", str(source), str(tmp_path / bad), *option])
        output = capsys.readouterr()
        if option == ["--remove"] and code == 0:
            assert output.out == "There is no copy.\n"
        else:
            assert code == 1
            assert output.err.startswith("lightning-feed: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "data", "file", "loop"]


def test_a_source_whose_name_leaves_no_room_for_ours_is_reported(source: Path, dest: Path) -> None:
    long = source.rename(source.parent / ("b" * 250))
    with pytest.raises(ArchiveError, match=r"File name too long\. Choose a shorter SRC name"):
        stage(long, dest)
    with pytest.raises(ArchiveError, match="cannot be removed: File name too long"):
        unstage(long, dest)


@as_root
def test_removing_from_a_folder_that_another_user_has_closed_is_reported(
    source: Path, dest: Path, tmp_path: Path
) -> None:
    stage(source, dest)
    dest.chmod(0o700)
    # Once as root, so that all is imported: nobody may not even read the folder that Python lies in.
    program = (
        "import os, sys; from lightning_feed.cli import main; main(['stage', '--remove', sys.argv[1], sys.argv[3]]);"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY});"
        "sys.exit(main(['stage', '--remove', *sys.argv[1:3]]))"
    )
    arguments = [str(source), str(dest), str(tmp_path / "none")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, cwd="/"
    )
    assert (done.returncode, done.stdout) == (1, "There is no copy.\n")
    assert done.stderr.startswith("lightning-feed: ")
    assert done.stderr.count("\n") == 1
    assert "cannot be removed: Permission denied. Use a DEST" in done.stderr
    assert contents(dest / "birds") == contents(source)


# --- what is no file, and what is deep ----------------------------------------------------------------------------


def test_a_file_that_became_a_fifo_is_not_waited_for(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stage_copy.Mirror.apply

    def apply(mirror: stage_copy.Mirror) -> None:
        (source / "1.jpg").unlink()
        os.mkfifo(source / "1.jpg")
        real(mirror)

    monkeypatch.setattr(stage_copy.Mirror, "apply", apply)
    with pytest.raises(ArchiveError, match=r"1\.jpg could not be copied .*: it is not a file"):
        stage(source, dest)
    assert not (dest / "birds/1.jpg").exists()


@pytest.mark.parametrize("special", ["/dev/zero", "fifo"])
def test_what_is_no_file_is_not_staged(source: Path, dest: Path, tmp_path: Path, special: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (source / "x.jpg").symlink_to(tmp_path / special)
    with pytest.raises(ArchiveError, match=r"x\.jpg is neither a file nor a folder"):
        stage(source, dest)
    with pytest.raises(ArchiveError, match="is neither a file nor a folder"):
        stage(source / "x.jpg", dest)


def test_folders_deeper_than_pythons_stack_are_staged_and_removed(tmp_path: Path) -> None:
    root, deep = tmp_path / "s", str(tmp_path / "s")
    root.mkdir()
    before = sys.getrecursionlimit()  # 1000, and reached by 1,500 folders, which take half a minute here
    try:
        for _ in range(400):
            deep += "/d"
            os.mkdir(deep)  # noqa: PTH102
        Path(f"{deep}/1.jpg").write_bytes(b"deep")
        sys.setrecursionlimit(len(inspect.stack()) + 250)
        done = stage(root, tmp_path / "f")
        assert (done.files, done.copied_files) == (1, 1)
        assert Path(deep.replace("/s/", "/f/s/") + "/1.jpg").read_bytes() == b"deep"
        assert stage(root, tmp_path / "f", force=True).copied_files == 1
        assert unstage(root, tmp_path / "f") is True
        assert list((tmp_path / "f").iterdir()) == []
    finally:
        sys.setrecursionlimit(before)
        subprocess.run(["rm", "-rf", str(root), str(tmp_path / "f")], check=True)  # what pytest could not remove
