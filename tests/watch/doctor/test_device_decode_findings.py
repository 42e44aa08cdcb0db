"""What the doctor says of DALI, nvJPEG and torchcodec, on machines that have them, or not, or the wrong ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from watch.doctor.made_machine import fake_torch, made_machine

from lightning_feed.watch.doctor.examine import examine
from lightning_feed.watch.doctor.finding import Finding

NO_DALI = {"nvidia-dali-cuda120": None}
FOR_13 = {"nvidia-dali-cuda120": None, "nvidia-dali-cuda130": "2.4.0"}
CPU_TORCH = {"torch": fake_torch(cuda=None, available=False)}


def _look(root: Path, topic: str, **changes: Any) -> Finding:
    (found,) = [one for one in examine(None, made_machine(root, **changes)) if one.topic == topic]
    return found


@pytest.mark.parametrize(
    ("versions", "cuda", "level", "value", "words", "do"),
    [
        ({}, "12.6", "ok", "2.4.0 for CUDA 12", "", ""),
        (FOR_13, "13.2", "ok", "2.4.0 for CUDA 13", "", ""),
        (NO_DALI, "12.6", "note", "not installed", "need it", "pip install nvidia-dali-cuda120"),
        (NO_DALI, "13.2", "note", "not installed", "need it", "pip install nvidia-dali-cuda130"),
        (NO_DALI, None, "ok", "not installed", "need it", ""),
        ({}, None, "ok", "2.4.0 for CUDA 12", "dali-gpu does not", ""),
        (
            FOR_13, "12.6", "warning", "2.4.0 for CUDA 13", "torch is built for CUDA 12",
            "pip uninstall --yes nvidia-dali-cuda130 && pip install nvidia-dali-cuda120",
        ),
        ({}, "11.8", "warning", "2.4.0 for CUDA 12", "torch is built for CUDA 11", ""),
        (
            {"nvidia-dali-cuda120": "1.50.0"}, "12.6", "warning", "1.50.0 for CUDA 12", "older than 2.0",
            "pip install --upgrade nvidia-dali-cuda120",
        ),
        (
            {"nvidia-dali-cuda130": "2.4.0"}, "13.2", "warning", "2.4.0 for CUDA 12, 2.4.0 for CUDA 13", "two builds",
            "pip uninstall --yes nvidia-dali-cuda120 nvidia-dali-cuda130 && pip install nvidia-dali-cuda130",
        ),
    ],
)  # fmt: skip
def test_dali(
    versions: dict[str, Any], cuda: str | None, level: str, value: str, words: str, do: str, tmp_path: Path
) -> None:
    torch = fake_torch(cuda=cuda, available=cuda is not None)
    found = _look(tmp_path, "DALI", versions=versions, modules={"torch": torch})
    assert (found.level, found.value, found.do) == (level, value, do)
    assert words in found.meaning


def test_nvjpeg_is_seen_by_the_build(tmp_path: Path) -> None:
    found = _look(tmp_path, "nvJPEG")
    assert (found.level, found.value) == ("ok", "in torchvision")


def test_a_torchvision_for_the_cpu_beside_a_torch_for_cuda(tmp_path: Path) -> None:
    found = _look(tmp_path, "nvJPEG", modules={"torchvision.version": SimpleNamespace()})
    assert (found.level, found.value) == ("note", "not in torchvision")
    assert found.do.endswith("whl/cu126")


def test_a_torchvision_without_the_operator(tmp_path: Path) -> None:
    torch = fake_torch()
    torch.ops = SimpleNamespace(image=SimpleNamespace())
    assert _look(tmp_path, "nvJPEG", modules={"torch": torch}).value == "not in torchvision"


def test_without_cuda_nothing_is_missing(tmp_path: Path) -> None:
    modules = {**CPU_TORCH, "torchvision.version": SimpleNamespace()}
    found = _look(tmp_path, "nvJPEG", modules=modules)
    assert (found.level, found.value, found.do) == ("ok", "not in torchvision", "")


def test_a_torchvision_that_cannot_be_loaded_is_not_known(tmp_path: Path) -> None:
    found = _look(
        tmp_path, "nvJPEG", modules={"torchvision.io": RuntimeError("operator torchvision::nms does not exist")}
    )
    assert (found.level, found.value) == ("note", "not known")
    assert "torchvision::nms" in found.meaning


@pytest.mark.parametrize(("version", "value"), [("0.17", "0.17"), (None, "not installed")])
def test_torchcodec_is_never_missed(version: str | None, value: str, tmp_path: Path) -> None:
    found = _look(tmp_path, "torchcodec", versions={"torchcodec": version})
    assert (found.level, found.value, found.do) == ("ok", value, "")
