"""The parts of the GPU's pipeline that DALI takes on the CPU as well, so that they are checked without a GPU."""

import gc
import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from made_samples import jpegs

from lightning_feed.images import dali_binding
from lightning_feed.images.dali_binding import DaliOptions, take_output
from lightning_feed.images.dali_decoder import ImagePipeline, PipelineSpec, gpu_decoding, normalised

dali = pytest.importorskip("nvidia.dali")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def spec(**options: Any) -> PipelineSpec:
    half = options.pop("half", False)
    return PipelineSpec(
        batch_size=2,
        device=torch.device("cuda", 0),
        threads=1,
        options=DaliOptions(device="gpu", prefetch=1, **options),
        mean=MEAN,
        std=STD,
        half=half,
    )


def run(graph: Any, files: list[bytes]) -> torch.Tensor:
    pipeline = dali.Pipeline(batch_size=len(files), num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        given = dali.fn.external_source(source=lambda: [np.frombuffer(file, np.uint8) for file in files])
        pipeline.set_outputs(graph(given))
    pipeline.build()
    pipeline.schedule_run()
    return take_output(pipeline, torch.device("cpu"))


@pytest.mark.parametrize("half", [False, True])
def test_dali_normalisation_matches_the_device_transform(half: bool) -> None:
    decode = dali.fn.decoders.image
    pixels = run(decode, jpegs(1)).permute(0, 3, 1, 2)
    made = run(lambda given: normalised(dali, decode(given), spec(half=half)), jpegs(1)).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    expected = (pixels.float() / 255 - mean) / std
    assert made.dtype == (torch.float16 if half else torch.float32)
    assert made.stride() == pixels.stride()
    assert torch.allclose(made.float(), expected, atol=2e-3 if half else 1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"largest_image": (200, 300)}, {"largest_image": (9000, 9000), "hw_decoder_load": 0.0}]
)
def test_gpu_decoding_options_are_accepted_by_dali(options: dict[str, Any]) -> None:
    given = gpu_decoding(spec(**options))
    decode = dali.fn.decoders.image_slice
    assert run(lambda file: decode(file, start=[0, 0], shape=[9, 8], axis_names="HW", **given), jpegs(1)).shape[
        1:3
    ] == (
        9,
        8,
    )
    assert ("device_memory_padding" in given) == ("largest_image" in options)


@pytest.mark.parametrize(
    ("version", "asked"),
    [((13, 2), True), ((13, 3), True), ((14, 0), True), ((13, 1), False), ((12, 4), False), (None, False)],
)
def test_fancy_upsampling_is_requested_only_if_nvjpeg_supports_it(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None, asked: bool
) -> None:
    """An older nvJPEG would make nvImageCodec write a warning for every image."""
    monkeypatch.setattr(dali_binding, "nvjpeg_version", lambda: version)
    assert gpu_decoding(spec())["jpeg_fancy_upsampling"] is asked


def test_decoder_buffers_are_sized_for_the_largest_image() -> None:
    """The figures of DALI's ImageNet example, rounded up."""
    found = gpu_decoding(spec(largest_image=(6430, 5980)))
    assert found["device_memory_padding"] == pytest.approx(211025920, rel=0.02)
    assert found["host_memory_padding"] == pytest.approx(140544512, rel=0.02)
    assert (found["preallocate_height_hint"], found["preallocate_width_hint"]) == (6430, 5980)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_forked_process_can_collect_a_garbage_pipeline_of_its_parent() -> None:
    """Its threads are not there: freeing it would never end."""
    garbage: list[Any] = [ImagePipeline(replace(spec(), device=torch.device("cpu")))]
    garbage.append(garbage)
    gc.disable()
    try:
        del garbage
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    assert os.waitpid(pid, 0)[1] == 0
