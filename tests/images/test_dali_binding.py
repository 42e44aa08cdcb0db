"""DALI missing, broken, too old or of another CUDA than torch: each error has the line that fixes it."""

import ctypes
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_feed.errors import MissingExtraError, SettingsError
from lightning_feed.images.dali_binding import nvjpeg_version, pip_line, require_dali

FOR_13 = "pip install 'lightning-feed[dali]'"
FOR_12 = "pip install nvidia-dali-cuda120"


def install(monkeypatch: pytest.MonkeyPatch, version: str | None = "2.4.0", cuda: int | None = 13048) -> ModuleType:
    module: Any = ModuleType("nvidia.dali")
    if version is not None:
        module.__version__ = version
    if cuda is not None:
        module.__cuda_version__ = cuda
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.dali", module)
    return module


def failing_import(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> None:
        assert name == "nvidia.dali"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)


@pytest.mark.parametrize("gpu", [False, True])
def test_require_dali_returns_a_matching_dali(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    module = install(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert require_dali(gpu=gpu) is module


@pytest.mark.parametrize(
    ("cuda", "line"), [("13.0", FOR_13), ("14.1", FOR_13), (None, FOR_13), ("12.4", FOR_12), ("11.8", FOR_12)]
)
def test_missing_dali_is_reported_with_the_pip_line_for_the_cuda_of_torch(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, line: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingExtraError) as raised:
        require_dali(gpu=False, why="backend='dali-cpu'")
    assert str(raised.value) == f"backend='dali-cpu' needs NVIDIA DALI. Install it:  {line}"
    assert pip_line() == line


@pytest.mark.parametrize(
    "error", [ImportError("libdali.so: cannot open shared object file"), ModuleNotFoundError("no gast", name="gast")]
)
def test_a_dali_that_cannot_be_loaded_is_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing_import(monkeypatch, error)
    with pytest.raises(
        MissingExtraError, match=r"installed but cannot be loaded: .*pip install --force-reinstall "
    ) as it:
        require_dali(gpu=False)
    assert it.value.__cause__ is error


@pytest.mark.parametrize("version", ["1.53.0", "0.9", None])
def test_a_dali_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    install(monkeypatch, version)
    with pytest.raises(
        SettingsError, match=r"needs NVIDIA DALI 2.0 or newer, but DALI .* Upgrade it:  pip install --up"
    ):
        require_dali(gpu=False)


@pytest.mark.parametrize("version", ["2.0.0", "2.4.0.dev1", "3.1"])
def test_newer_versions_of_dali_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = install(monkeypatch, version)
    assert require_dali(gpu=False) is module


def test_a_dali_for_another_cuda_than_torch_is_refused_only_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, cuda=12986)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert require_dali(gpu=False) is module
    with pytest.raises(SettingsError) as raised:
        require_dali(gpu=True)
    assert "is for CUDA 13.0, but the installed DALI 2.4.0 is for CUDA 12." in str(raised.value)
    assert str(raised.value).endswith(f"pip uninstall --yes nvidia-dali-cuda120  &&  {FOR_13}")


def test_a_torch_without_cuda_accepts_a_dali_for_any_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, cuda=12986)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert require_dali(gpu=True) is module


def test_a_dali_for_an_unknown_cuda_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, cuda=None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert require_dali(gpu=True) is module


# --- nvJPEG -----------------------------------------------------------------------------------------------------------


class FakeNvjpeg:
    """A library with nvjpegGetProperty."""

    def __init__(self, version: tuple[int, int], status: int = 0) -> None:
        self.version = version
        self.status = status

    def nvjpegGetProperty(self, kind: int, value: Any) -> int:
        value._obj.value = self.version[kind]
        return self.status


def test_nvjpeg_version_is_read_from_the_library_for_the_cuda_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or FakeNvjpeg((12, 4)))
    assert nvjpeg_version() == (12, 4)
    assert opened == ["libnvjpeg.so.12"]


def test_nvjpeg_version_is_none_if_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    for library in (missing, lambda name: object(), lambda name: FakeNvjpeg((13, 3), status=1)):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert nvjpeg_version() is None
