"""The demo on small input: its images, its two runs, its table, and every way it can go wrong."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_feed import cli, demo
from lightning_feed.demo import SOURCES, FedImages, SmallResNet, find_images, make_images, plain_loader
from lightning_feed.errors import DatasetError, MissingExtraError, SettingsError


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

    folder = make_images(tmp_path, 40)
    files = sorted(folder.glob("*/*.jpg"))
    assert {file.parent.name for file in files} == set(SOURCES)
    assert len({file.read_bytes() for file in files}) == len(files) == 40
    for file in files:
        with Image.open(file) as image:
            assert image.format == "JPEG"
            assert image.mode == "RGB"
            assert all(280 <= side <= 480 for side in image.size)


def test_images_are_the_same_each_time(tmp_path: Path) -> None:
    first, second = (make_images(tmp_path / name, 5) for name in "ab")
    for file in first.glob("*/*.jpg"):
        assert (second / file.relative_to(first)).read_bytes() == file.read_bytes()


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


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(DatasetError, match="could not be written to"):
        make_images(tmp_path / "out", 3)


def test_without_scikit_image_the_line_to_paste_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "skimage.data", None)
    monkeypatch.setitem(__import__("sys").modules, "skimage", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-feed\[demo\]'"):
        make_images(tmp_path, 3)


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
def test_the_demo_prints_both_reports_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--images", "130", "--epochs", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    table = printed.out
    labels = ("step ms", "compute", "data", "h2d", "other", "starved %", "samples/s", "epoch s", "verdict")
    assert re.search(r"^ +plain +fed$", table, re.MULTILINE)
    for label in labels:
        assert re.search(rf"^ *{label}  +\S.*  +\S", table, re.MULTILINE), label
    assert f"tensorboard --logdir {tmp_path / 'logs'}" in table
    assert "%|" not in printed.err + table  # no progress bar: this is no terminal
    for name in ("plain", "fed"):
        assert list((tmp_path / "logs" / name).glob("version_0/events.out.*"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["logs", "pictures-130"]


def test_json_holds_the_same_figures(class_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["demo", "--data", str(class_folders), "--epochs", "1", "--out", str(out), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["pictures"] == 12
    for name in ("plain", "fed"):
        run = outcome[name]
        assert run["samples_per_s"] * run["epoch_s"] == pytest.approx(12)
        # One step of an epoch's own: too short to measure, and so absent rather than 0.
        assert run["starved_pct"] is None


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


def test_both_datasets_give_the_same_pixels(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(SmallResNet, "training_step", press)
    assert cli.main(["demo", "--data", str(class_folders), "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "lightning-feed: stopped"
