"""A machine that says that it has a GPU, and what was measured on it: training waits for decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_feed.data import image_backends, images
from lightning_feed.data.backend_measurements import BackendMeasurement, BackendMeasurements, measurement_key

CUDA = torch.device("cuda")
BOUND = BackendMeasurement(
    backend="torch",
    by="diagnose",
    day="2026-11-21",
    batch_size=4,
    cpu_bound=True,
    starved_pct=60.0,
    samples_per_s=100.0,
)


def without_dali(backend: str, device: torch.device) -> str:
    return "DALI is not installed" if backend in image_backends.DALI_BACKENDS else ""


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nvJPEG and without DALI. Batches go to the CPU nevertheless, and are decoded there."""
    monkeypatch.setattr(images, "device_of", lambda trainer: CUDA)
    monkeypatch.setattr(image_backends, "require_nvjpeg", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Board")
    monkeypatch.setattr(image_backends, "why_missing", without_dali)


def remember(root: Path, finding: BackendMeasurement = BOUND, **key: Any) -> None:
    """Have ``backend="auto"`` find this of a folder."""
    BackendMeasurements().save(measurement_key(root, CUDA, **({"image_size": 32, "quality": "exact"} | key)), finding)
