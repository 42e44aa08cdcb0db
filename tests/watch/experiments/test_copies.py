"""X8: what is said without a CUDA device, and the copies on one."""

import pytest
import torch

from lightning_feed.watch.experiments.copies import BUFFER_BYTES, measure_copies, why_no_copies


def test_why_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is the CPU" in str(why_no_copies(None))
    assert "is the CPU" in str(why_no_copies(torch.device("cpu")))
    assert "type 'mps'" in str(why_no_copies(torch.device("mps")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in str(why_no_copies(torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_no_copies(torch.device("cuda", 0)) is None


def test_too_little_device_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (BUFFER_BYTES, 10**12))
    assert "more than half of the free device memory" in str(measure_copies([torch.ones(5)], torch.device("cuda", 0)))


@pytest.mark.gpu
def test_copies_on_a_device() -> None:
    batch = {"image": torch.ones(64, 3, 224, 224).pin_memory(), "label": torch.ones(64)}
    copies = measure_copies(batch, torch.device("cuda", 0))
    assert not isinstance(copies, str)
    assert copies.pinned_gb_per_s >= 0.8 * copies.pageable_gb_per_s > 0
    assert copies.copy_ms > 0
