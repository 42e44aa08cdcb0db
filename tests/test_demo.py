"""The demo on small input: its images, its three runs, its table, and every way it can go wrong."""

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import termios
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import warm
from cells import in_gate

from lightning_feed import cli, demo, demo_images
from lightning_feed.demo import RUNS, find_images
from lightning_feed.demo_images import SIDES, SOURCES, make_images
from lightning_feed.errors import DatasetError
from lightning_feed.report.document import read_document
from lightning_feed.report.files import as_text


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX, "the demo must not touch the network"  # workers hand batches over by it
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


# --- images -------------------------------------------------------------------------------------------------------


def test_made_images_are_distinct_jpegs_of_every_source(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["ctrl-c", "disk"])
def test_make_images_leaves_no_partial_files_when_stopped(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = demo_images._write_varied, []

    def stops_at_the_fifth(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 5:
            raise stop
        real(*arguments)

    monkeypatch.setattr(demo_images, "_write_varied", stops_at_the_fifth)
    with pytest.raises((KeyboardInterrupt, DatasetError)) as caught:
        make_images(tmp_path, 20)
    assert len(calls) == 5
    assert list(tmp_path.iterdir()) == []
    if isinstance(stop, OSError):
        assert "No space left on device" in str(caught.value)
        assert "--out" in str(caught.value)


def test_find_images_takes_images_evenly_from_the_classes(class_folders: Path) -> None:
    everything = find_images(class_folders, 100)
    assert everything.classes == ["cats", "dogs"]
    assert [label for _, label in everything.samples] == [0] * 6 + [1] * 6
    assert [label for _, label in find_images(class_folders, 4).samples] == [0, 0, 1, 1]


# --- the whole ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_prints_the_plain_report_and_compares_all_three_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, images=192))
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    told, table = re.split(r"\n\n +plain ", printed.out)
    labels = (
        "step ms",
        "compute",
        "data",
        "copy",
        "other",
        "starved %",
        "set-up s",
        "epoch s",
        "samples/s",
        "verdict",
    )
    for label in labels:
        assert re.search(rf"^ *{label}  +\S.*  +\S.*  +\S", table, re.MULTILINE), label
    assert "%|" not in printed.err + printed.out  # no progress bar: this is no terminal
    for name in RUNS:
        folder = tmp_path / "logs" / name / "version_0"
        assert list(folder.glob("events.out.*"))
        assert str(folder / "feed_report.html") in table
    plain = read_document(tmp_path / "logs" / "plain" / "version_0")
    assert as_text(plain.diagnosis) in told  # as it was written, not made up
    assert "ImageFolderDataModule(" in told  # and it does advise what the third run does
    assert "predicted a step" not in table
    page = (tmp_path / "report.html").read_text()
    assert page.count('<svg class="stack"') == 3
    for name in RUNS:
        assert f'<a href="logs/{name}/version_0/feed_report.html">{name}</a>' in page
    behind = (tmp_path / "logs" / "plain" / "version_0" / "feed_report.html").read_text()
    style = re.compile("<style>.*</style>", re.DOTALL)
    assert style.findall(page) == style.findall(behind)
    assert "times as fast" in page
    assert all(f"a step of {name}" in page for name in RUNS)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["logs", "pictures-192", "report.html"]


def test_an_unwritable_output_folder_is_named(capsys: pytest.CaptureFixture[str], class_folders: Path) -> None:
    """/proc, where nobody can make a file, not even root."""
    assert cli.main(["demo", "--data", str(class_folders), "--out", "/proc/demo"]) == 1
    message = capsys.readouterr().err
    assert "reports cannot be written into /proc/demo" in message
    assert "Give another folder" in message
    assert "Traceback" not in message


def test_a_corrupt_jpeg_is_named_with_advice(
    class_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = class_folders / "dogs" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    assert cli.main(["demo", "--data", str(class_folders), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert f"{broken} cannot be read as an image" in message
    assert "Delete it or replace it" in message
    assert "Traceback" not in message
    with pytest.raises(DatasetError, match=r"dogs/3\.jpg cannot be read as an image .* Delete it or replace it"):
        find_images(class_folders, 100)[9]


@pytest.mark.parametrize(("taken_pct", "said"), [(57.0, "Other programs take 57 % of the CPUs"), (3.0, ""), (None, "")])
def test_the_demo_warns_at_the_start_if_the_machine_is_busy(
    taken_pct: float | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "others_pct_now", lambda _: taken_pct)
    demo._say_if_busy()
    printed = capsys.readouterr()
    assert printed.err.startswith(said)
    assert bool(printed.err) == bool(said)
    assert printed.out == ""


# --- as a program of its own ----------------------------------------------------------------------------------------

WAIT_S = 120
COMMAND = ("-m", "lightning_feed", "demo")


def _read(screen: int, into: list[bytes]) -> None:
    while True:
        try:
            into.append(os.read(screen, 65536))
        except OSError:  # how Linux tells that nobody writes there any more
            return


@pytest.mark.slow
def test_the_demo_draws_progress_on_stderr_and_prints_figures_on_stdout(tmp_path: Path, class_folders: Path) -> None:
    """On one CPU, as `taskset -c 0` gives it."""
    screen, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # a new one has no columns to draw in
    with (tmp_path / "printed").open("w") as printed:
        demo = warm.start(
            [*COMMAND, "--data", class_folders, "--out", tmp_path, "--json"],
            streams=(theirs, printed.fileno(), theirs),
            cpus={min(os.sched_getaffinity(0))},
        )
    os.close(theirs)
    drawn: list[bytes] = []
    reader = threading.Thread(target=_read, args=(screen, drawn))
    reader.start()
    status = demo.wait(WAIT_S)
    reader.join(WAIT_S)
    os.close(screen)
    assert status == 0, b"".join(drawn).decode()
    outcome = json.loads((tmp_path / "printed").read_text())
    assert outcome["cpus"] == 1
    for name in RUNS:
        assert f"{name:8}: 100%".encode() in b"".join(drawn)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("while_", in_gate(["making images", "training"], ["training"]))
def test_ctrl_c_ends_the_demo_with_one_line(while_: str, tmp_path: Path, class_folders: Path) -> None:
    out = tmp_path / "out"
    given = [] if while_ == "making images" else ["--data", str(class_folders)]
    awaited = ".unfinished-*/*/*/*.jpg" if while_ == "making images" else "logs/plain/version_0/events.out.*"
    demo = warm.start_into(tmp_path / "said", [*COMMAND, *given, "--out", out])
    latest = time.monotonic() + WAIT_S
    while not list(out.glob(awaited)):
        assert demo.poll() is None
        assert time.monotonic() < latest
        time.sleep(0.1)
    os.killpg(demo.pid, signal.SIGINT)  # as a terminal does it: to all of its processes
    assert demo.wait(WAIT_S) == 130
    said = (tmp_path / "said").read_text()
    assert said.splitlines()[-1] == "lightning-feed: stopped"
    assert "Traceback" not in said
    assert not list(out.glob(".unfinished-*"))
