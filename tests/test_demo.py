"""The demo on small input: its images, its three runs, its table, and every way it can go wrong."""

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_feed import cli, demo
from lightning_feed.demo import (
    RUNS,
    SIDES,
    SOURCES,
    FedImages,
    SmallModel,
    demo_text,
    find_images,
    make_images,
    plain_loader,
)
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.watch.reports.document import read_document
from lightning_feed.watch.reports.files import as_text


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX, "the demo must not touch the network"  # workers hand batches over by it
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


# --- images -------------------------------------------------------------------------------------------------------


def test_images_are_jpegs_of_every_source_and_no_two_are_alike(tmp_path: Path) -> None:
    from PIL import Image

    folder = make_images(tmp_path, 20)
    files = sorted(folder.glob("*/*.jpg"))
    assert {file.parent.name for file in files} == set(SOURCES)
    assert len({file.read_bytes() for file in files}) == len(files) == 20
    for file in files:
        with Image.open(file) as image:
            assert image.format == "JPEG"
            assert image.mode == "RGB"
            assert all(SIDES[0] <= side <= SIDES[1] for side in image.size)


def test_finished_images_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_images(tmp_path, 12)
    monkeypatch.setattr(demo, "_write_images", None)  # a second writing would fail
    assert make_images(tmp_path, 12) == folder


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["ctrl-c", "disk"])
def test_nothing_half_written_is_left(stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = demo._varied_jpeg, []

    def stops_at_the_fifth(*arguments: Any) -> bytes:
        calls.append(arguments)
        if len(calls) == 5:
            raise stop
        return real(*arguments)

    monkeypatch.setattr(demo, "_varied_jpeg", stops_at_the_fifth)
    with pytest.raises((KeyboardInterrupt, DatasetError)) as caught:
        make_images(tmp_path, 20)
    assert len(calls) == 5
    assert list(tmp_path.iterdir()) == []
    if isinstance(stop, OSError):
        assert "No space left on device" in str(caught.value)
        assert "--out" in str(caught.value)


def test_found_images_are_taken_evenly_over_the_classes(class_folders: Path) -> None:
    everything = find_images(class_folders, 100)
    assert everything.classes == ["cats", "dogs"]
    assert [label for _, label in everything.samples] == [0] * 6 + [1] * 6
    assert [label for _, label in find_images(class_folders, 4).samples] == [0, 0, 1, 1]
    with pytest.raises(SettingsError, match="--images 0"):
        find_images(class_folders, 0)


# --- the whole ----------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt_handler() -> Iterator[None]:
    """Lightning ignores SIGINT for the rest of the process once it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_the_demo_shows_the_report_of_the_plain_run_and_all_three_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--images", "192", "--epochs", "3", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    told, table = printed.out.split("\n\n           plain")
    labels = ("step ms", "compute", "data", "h2d", "other", "starved %", "set-up s", "epoch s", "samples/s", "verdict")
    for label in labels:
        assert re.search(rf"^ *{label}  +\S.*  +\S.*  +\S", table, re.MULTILINE), label
    assert "%|" not in printed.err + printed.out  # no progress bar: this is no terminal
    for name in RUNS:
        folder = tmp_path / "logs" / name / "version_0"
        assert list(folder.glob("events.out.*"))
        assert str(folder / "feed_report.html") in table
    plain = read_document(tmp_path / "logs" / "plain" / "version_0")
    assert as_text(plain.diagnosis) in told  # as it was written, not made up
    assert "ImageFolderDataModule(FOLDER" in told  # and it does advise what the third run does
    page = (tmp_path / "report.html").read_text()
    assert page.count("<span") == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["logs", "pictures-192", "report.html"]


def test_json_holds_the_same_figures(class_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["demo", "--data", str(class_folders), "--epochs", "1", "--out", str(out), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["pictures"] == 12
    assert outcome["ratio"] == pytest.approx(outcome["plain"]["epoch_s"] / outcome["advised"]["epoch_s"])
    for name in RUNS:
        run = outcome[name]
        assert run["samples_per_s"] * run["epoch_s"] == pytest.approx(12)
        # One step of an epoch's own: too short to measure, and so absent rather than 0.
        assert run["starved_pct"] is None


def _outcome(**changed: Any) -> dict[str, Any]:
    run = {**dict.fromkeys(demo.ROWS, 1.5), "verdict": "compute: OK"}
    told = {"pictures": 9, "epochs": 1, "cpus": 2, "device": "CPU", "workers": 2, "decoder": "turbo", "ratio": 2.0}
    paths = {"report": "r", "reports": dict.fromkeys(RUNS, "p"), "logs": "l", "plain_report": "FEED"}
    return {**dict.fromkeys(RUNS, run), **told, **paths, **changed}


def test_what_stands_in_for_a_gpu_is_said() -> None:
    assert "half of the CPUs" in demo_text(_outcome())


def test_a_folder_that_cannot_be_written_to_is_named(capsys: pytest.CaptureFixture[str], class_folders: Path) -> None:
    """/proc, where nobody can make a file, not even root."""
    assert cli.main(["demo", "--data", str(class_folders), "--out", "/proc/demo"]) == 1
    message = capsys.readouterr().err
    assert "reports cannot be written into /proc/demo" in message
    assert "Give another folder" in message
    assert "Traceback" not in message


def test_a_corrupt_jpeg_is_named_with_what_to_do(
    class_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = class_folders / "dogs" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    assert cli.main(["demo", "--data", str(class_folders), "--epochs", "1", "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert f"{broken} cannot be read as an image" in message
    assert "Delete it or replace it" in message
    assert "Traceback" not in message
    with pytest.raises(DatasetError, match=r"dogs/3\.jpg cannot be read as an image .* Delete it or replace it"):
        find_images(class_folders, 100)[9]


def test_plain_and_fed_give_the_same_pixels(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.v2, "RandomResizedCrop", lambda side: demo.v2.Identity())  # random: take all of the image
    monkeypatch.setattr(demo.v2, "RandomHorizontalFlip", demo.v2.Identity)
    images = find_images(class_folders, 100)
    plain = plain_loader(images).dataset[7]
    fed_data = FedImages(images)
    dataset = fed_data.make_dataset("train")
    assert dataset is not None
    pixels, label = dataset[7]
    assert pixels.dtype == torch.uint8
    fed, _ = fed_data.device_transform((pixels[None], torch.tensor([label])), "train")
    torch.testing.assert_close(fed[0], plain[0])
    assert label == plain[1] == 1


@pytest.mark.usefixtures("interrupt_handler")
def test_ctrl_c_while_training_is_130(
    class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SmallModel, "training_step", press)
    assert cli.main(["demo", "--data", str(class_folders), "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "lightning-feed: stopped"


# --- as a program of its own ----------------------------------------------------------------------------------------

WAIT_S = 120
COMMAND = [sys.executable, "-m", "lightning_feed", "demo"]


def _start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], text=True, start_new_session=True, **options)


def _read(screen: int, into: list[bytes]) -> None:
    while True:
        try:
            into.append(os.read(screen, 65536))
        except OSError:  # how Linux tells that nobody writes there any more
            return


@pytest.mark.slow
def test_in_a_terminal_progress_is_drawn_on_stderr_and_stdout_is_for_the_figures(
    tmp_path: Path, class_folders: Path
) -> None:
    """On one CPU, as `taskset -c 0` gives it."""
    screen, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # a new one has no columns to draw in
    one = {min(os.sched_getaffinity(0))}
    demo = _start(
        *("--data", str(class_folders), "--epochs", "2", "--out", str(tmp_path), "--json"),
        stdout=subprocess.PIPE,
        stderr=theirs,
        preexec_fn=lambda: os.sched_setaffinity(0, one),
    )
    os.close(theirs)
    drawn: list[bytes] = []
    reader = threading.Thread(target=_read, args=(screen, drawn))
    reader.start()
    printed, _ = demo.communicate(timeout=WAIT_S)
    reader.join(WAIT_S)
    os.close(screen)
    assert demo.returncode == 0, b"".join(drawn).decode()
    outcome = json.loads(printed)
    assert outcome["cpus"] == 1
    for name in RUNS:
        assert f"{name:8}: 100%".encode() in b"".join(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("while_", ["making images", "training"])
def test_ctrl_c_ends_it_with_one_line(while_: str, tmp_path: Path, class_folders: Path) -> None:
    out = tmp_path / "out"
    given = ["--images", "100000"] if while_ == "making images" else ["--data", str(class_folders), "--epochs", "99999"]
    awaited = ".unfinished-*/*/*.jpg" if while_ == "making images" else "logs/plain/version_0/events.out.*"
    with (tmp_path / "said").open("w+") as said:
        demo = _start(*given, "--out", str(out), stdout=said, stderr=said)
        latest = time.monotonic() + WAIT_S
        while not list(out.glob(awaited)):
            assert demo.poll() is None
            assert time.monotonic() < latest
            time.sleep(0.1)
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does it: to all of its processes
        assert demo.wait(WAIT_S) == 130
        said.seek(0)
        assert said.read().splitlines()[-1] == "lightning-feed: stopped"
        said.seek(0)
        assert "Traceback" not in said.read()
    assert not list(out.glob(".unfinished-*"))
