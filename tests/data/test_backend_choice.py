"""Image backends given by name: what each refuses, what goes with it, and the decoder that all ranks agree on."""

import logging
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from images.made_images import encoded
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from made_samples import jpegs, nvjpeg_dataset, photo, torn

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.data import images
from lightning_feed.data.image_run import once_for_all_ranks
from lightning_feed.errors import DatasetError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.images import backends
from lightning_feed.images.backends import Backend, check_backend, require_nvjpeg, resolve
from lightning_feed.images.dali_binding import DaliOptions
from lightning_feed.images.decode_ahead import NvJpegOptions

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says that it has a GPU, with nvJPEG. Batches go to the CPU, and are decoded there."""
    monkeypatch.setattr(images, "device_of", lambda trainer: CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "require_nvjpeg", lambda device: None)


def _refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("this need not be looked for")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", ["torch", "nvjpeg"])
def test_worker_processes_are_the_default(backend: Any, class_folders: Path) -> None:
    birds = ImageFolderDataModule(class_folders, 4, image_size=32, backend=backend)
    assert birds.backend_choice is None
    assert birds._feed_facts().backend is None
    birds.dataset("train")
    assert birds._feed.loaders.settings == LoaderSettings()
    assert birds.backend_choice is not None
    assert birds.backend_choice.name == birds._feed_facts().backend == backend
    assert pickle.loads(pickle.dumps(birds)).backend_choice == birds.backend_choice
    given = LoaderSettings(num_workers=0)
    birds = ImageFolderDataModule(class_folders, 4, image_size=32, backend=backend, loader=given)
    birds.train_dataloader()
    assert birds._feed.loaders.settings == given


class Cropped(ImageFolderDataModule):
    def device_transform(self, batch: Any, split: str) -> Any:
        return super().device_transform(batch, split)


class Mixed(ImageFolderDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Moved(ImageFolderDataModule):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class MixesHere(BoringModel):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("kind", "model", "normalizes"),
    [
        (ImageFolderDataModule, BoringModel, True),
        (Cropped, BoringModel, False),
        (Mixed, BoringModel, False),
        (Moved, BoringModel, False),
        (ImageFolderDataModule, MixesHere, False),
    ],
)
def test_work_of_the_user_in_the_transfer_is_told_from_our_own(
    kind: type[ImageFolderDataModule], model: type[BoringModel], normalizes: bool, class_folders: Path
) -> None:
    module = kind(class_folders, 4, image_size=32, backend="torch")
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model())
    module.trainer = trainer
    facts = module._feed_facts()
    assert (facts.device_transform, facts.normalizes) == (True, normalizes)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _rank(number: int, sent: list[Any]) -> Any:
    def broadcast(value: Any) -> Any:
        sent.append(value)
        return pickle.loads(pickle.dumps(sent[0]))

    return SimpleNamespace(world_size=2, is_global_zero=number == 0, strategy=SimpleNamespace(broadcast=broadcast))


def test_the_choice_of_rank_0_is_used_on_all_ranks() -> None:
    sent: list[Any] = []
    assert once_for_all_ranks(_rank(0, sent), lambda: "pillow") == "pillow"
    assert once_for_all_ranks(_rank(1, sent), _refuse) == "pillow"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DatasetError("it is gone"), (DatasetError, "Rank 0, .*: it is gone")),
        (KeyError("x"), (LoaderError, "Rank 0, .*: KeyError: 'x'")),
    ],
    ids=["ours", "another"],
)
def test_an_error_on_rank_0_is_raised_on_all_ranks(error: Exception, told: Any) -> None:
    sent: list[Any] = []

    def fails() -> str:
        raise error

    with pytest.raises(type(error)) as raised:
        once_for_all_ranks(_rank(0, sent), fails)
    assert raised.value is error
    kind, words = told
    with pytest.raises(kind, match=words):
        once_for_all_ranks(_rank(1, sent), _refuse)


def test_images_missing_only_on_rank_0_are_reported(class_folders: Path) -> None:
    birds = ImageFolderDataModule(class_folders, batch_size=4, image_size=32)
    birds.trainer = _rank(1, [(None, None)])
    with pytest.raises(DatasetError, match="Rank 0 finds no images for 'train', but another rank does"):
        birds.make_dataset("train")


def test_a_single_rank_broadcasts_nothing() -> None:
    trainer = SimpleNamespace(world_size=1, strategy=SimpleNamespace(broadcast=_refuse))
    assert once_for_all_ranks(trainer, lambda: "pillow") == "pillow"
    assert once_for_all_ranks(None, lambda: "pillow") == "pillow"


# --- options of DALI --------------------------------------------------------------------------------------------------


def test_dali_options_without_effect_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"largest_image=\(10, 20\)\) has an effect only on the GPU"):
        DaliOptions(largest_image=(10, 20))
    with pytest.raises(SettingsError, match=r"hw_decoder_load=0.0\) has an effect only on the GPU"):
        DaliOptions(hw_decoder_load=0.0)
    with pytest.raises(SettingsError, match="quality='fast' would have no effect with backend='dali-gpu'"):
        check_backend("dali-gpu", "fast")


@pytest.mark.parametrize("name", get_args(Backend))
def test_the_name_of_a_backend_stands_for_its_default_options(name: Backend) -> None:
    expected = {"dali-cpu": DaliOptions(), "dali-gpu": DaliOptions(device="gpu"), "nvjpeg": NvJpegOptions()}
    assert resolve(name) == (name, expected.get(name))


def test_dali_options_select_the_cpu_or_gpu_backend() -> None:
    for name, options in (
        ("dali-cpu", DaliOptions(threads=2)),
        ("dali-gpu", DaliOptions(device="gpu", largest_image=(10, 20), hw_decoder_load=0.5)),
    ):
        assert resolve(options) == (name, options)
    check_backend("torch", "fast")


# --- nvJPEG by name ------------------------------------------------------------------------------------------------


def _setting_up(root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ImageFolderDataModule:
    """As a Trainer sets it up that says that it has a GPU."""
    birds = ImageFolderDataModule(root, batch_size=4, image_size=32, decoder="pillow", **options)
    birds.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    monkeypatch.setattr(images, "device_of", lambda trainer: CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return birds


def test_a_torchvision_without_nvjpeg_is_reported_before_the_first_batch(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device) -> Any:
        raise MissingExtraError("this torchvision has none")

    monkeypatch.setattr(backends, "nvjpeg", missing)
    birds = _setting_up(class_folders, monkeypatch, backend="nvjpeg")
    with pytest.raises(MissingExtraError, match="this torchvision has none"):
        birds.train_dataloader()


def test_a_failing_nvjpeg_device_is_reported_before_the_first_batch(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(files: Any) -> Any:
        raise RuntimeError("CUDA driver version is insufficient\nwith a stack trace")

    monkeypatch.setattr(backends, "nvjpeg", lambda device: fails)
    birds = _setting_up(class_folders, monkeypatch, backend="nvjpeg")
    words = 'failed to decode a small JPEG on cuda.*driver version is insufficient. Check.*use backend="torch"'
    with pytest.raises(LoaderError, match=words) as raised:
        birds.train_dataloader()
    assert "stack trace" not in str(raised.value)


def test_nvjpeg_is_tried_on_one_small_jpeg_before_training(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(backends, "nvjpeg", lambda device: given.extend)
    _setting_up(class_folders, monkeypatch, backend="nvjpeg").train_dataloader()
    (file,) = given
    assert bytes(file[:2]) == b"\xff\xd8"


@pytest.mark.parametrize("backend", ["torch", "nvjpeg"])
def test_nvjpeg_is_not_tried_for_other_backends_or_without_a_trainer(
    backend: Any, class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not without a Trainer: CUDA that is in use does not outlive the fork of a ddp_fork."""
    monkeypatch.setattr(backends, "nvjpeg", _refuse)
    birds = _setting_up(class_folders, monkeypatch, backend=backend)
    if backend == "nvjpeg":
        birds.trainer = None
    birds.train_dataloader()


@pytest.mark.gpu(twin="data/test_backend_choice.py::test_nvjpeg_is_tried_on_one_small_jpeg_before_training")
def test_nvjpeg_is_available_on_a_gpu() -> None:
    require_nvjpeg(torch.device("cuda", 0))


# --- "auto" -----------------------------------------------------------------------------------------------------------


def _auto(files: list[bytes], cpus: int = 2, device: torch.device = CUDA) -> backends.BackendChoice:
    return backends.choose_backend(nvjpeg_dataset(files, decoder="pillow"), device, cpus)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("device_ms", "name"), [(0.0001, "nvjpeg"), (1e4, "torch")])
def test_auto_takes_the_side_that_decodes_more(device_ms: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "decoding_ms", lambda *_: device_ms)
    choice = _auto(jpegs(6))
    assert choice.name == name
    assert re.search(r"the device decodes \d+ images/s, and 2 CPUs \d+, tried with 6 images", choice.reason)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("cpus", "name"), [(2, "nvjpeg"), (3, "torch")])
def test_auto_tries_all_cpus_at_the_same_time(cpus: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs may share a core, so that each decodes less than one alone."""
    monkeypatch.setattr(backends, "decoding_ms", lambda *_: 4.0)
    made = backends._Try(images=100, seconds=1.0)
    monkeypatch.setattr(backends, "run_in_children", lambda works, **_: [made for _ in works])
    choice = _auto(jpegs(6), cpus)
    assert choice.name == name
    assert f"the device decodes 250 images/s, and {cpus} CPUs {cpus}00," in choice.reason


@pytest.mark.usefixtures("gpu")
def test_processes_of_auto_count_until_the_last_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they outnumber the CPUs, some get one later."""
    monkeypatch.setattr(backends, "decoding_ms", lambda *_: 4.0)
    tries = [backends._Try(images=100, seconds=1.0), backends._Try(images=100, seconds=2.0)]
    monkeypatch.setattr(backends, "run_in_children", lambda works, **_: tries)
    assert "2 CPUs 100," in _auto(jpegs(6), 2).reason


@pytest.mark.parametrize(
    ("capability", "has_one"),
    [((7, 5), False), ((8, 0), True), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)],
)
def test_a_gpu_without_an_engine_for_jpeg_is_named(
    capability: tuple[int, int], has_one: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backends, "require_nvjpeg", lambda device: None)
    monkeypatch.setattr(backends, "decoding_ms", lambda *_: 0.0001)
    assert ("on its cores, as it has no engine" in _auto(jpegs(3)).reason) is not has_one
    backends.tell_if_on_cores.cache_clear()
    with caplog.at_level(logging.INFO, "lightning_feed"):
        for _ in range(2):
            backends.tell_if_on_cores(CUDA)
    said = [record for record in caplog.records if "nvJPEG decodes on its cores" in record.getMessage()]
    assert len(said) == (0 if has_one else 1)
    backends.tell_if_on_cores.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_auto_leaves_files_that_nvjpeg_cannot_decode_to_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "decoding_ms", _refuse)
    choice = _auto([*jpegs(2), *[encoded(photo(), "PNG")] * 3])
    assert choice.name == "torch"
    assert "nvJPEG decodes only 2 of 5: nvJPEG decodes only JPEG" in choice.reason


@pytest.mark.usefixtures("gpu")
def test_auto_leaves_broken_files_out_of_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may skip them."""
    tried: list[int] = []
    monkeypatch.setattr(backends, "decoding_ms", lambda samples, *_: tried.append(len(samples)) or 0.0001)
    assert _auto([*jpegs(4), torn(jpegs(5)[4])]).name == "nvjpeg"
    assert tried == [4]
    assert _auto([torn(jpegs(1)[0])]).reason == 'backend="auto": there are no images to try'


@pytest.mark.usefixtures("gpu")
def test_auto_takes_the_cpus_if_the_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> float:
        raise LoaderError("the device decoded none")

    monkeypatch.setattr(backends, "decoding_ms", failing)
    assert _auto(jpegs(3)) == backends.BackendChoice("torch", 'backend="auto": the device decoded none')


def test_auto_without_a_decoding_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = _auto(jpegs(2), device=torch.device("cpu"))
    assert on_cpu.reason.endswith("training runs on cpu, which does not decode images")

    def missing(device: torch.device) -> None:
        raise MissingExtraError("no nvJPEG here")

    monkeypatch.setattr(backends, "require_nvjpeg", missing)
    assert _auto(jpegs(2)) == backends.BackendChoice("torch", 'backend="auto": no nvJPEG here')


@pytest.mark.parametrize("options", [{}, {"transform": lambda image: image}, {"drop_keys": ("a",)}])
def test_auto_without_a_gpu_trains_as_torch_does(options: Any, class_folders: Path) -> None:
    birds = ImageFolderDataModule(class_folders, 4, image_size=32, backend="auto", **options)
    dataset = birds.dataset("train")
    assert not dataset.encoded
    assert birds.backend_choice is not None
    assert birds.backend_choice.name == "torch"
    assert birds.backend_choice.reason.startswith('backend="auto": ')
