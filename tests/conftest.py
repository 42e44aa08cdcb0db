"""What several test files share."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_callbacks_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's LIGHTNING_FEED=1 must not add callbacks to the Trainers of the tests."""
    monkeypatch.delenv("LIGHTNING_FEED", raising=False)


@pytest.fixture(autouse=True)
def _no_memory_between_tests(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is remembered between runs goes to a folder of the test's own, not to the home of whoever runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True, scope="session")
def _short_waits_for_lost_workers() -> Iterator[None]:
    """A DataLoader's pass that is collected as part of a cycle has its queues closed before it can tell its workers to
    end, so torch waits 5 s for each of them and then kills it. Tests that raise and break off leave hundreds."""
    from torch.utils.data import _utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
        yield


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    """A folder of two class folders with six small JPEGs each."""
    import numpy as np
    from PIL import Image

    root = tmp_path / "photos"
    for label, name in enumerate(("cats", "dogs")):
        (root / name).mkdir(parents=True)
        for index in range(6):
            pixels = np.random.default_rng([label, index]).integers(0, 255, (48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.jpg")
    return root


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests with the mark ``gpu`` are skipped without a CUDA device, and fail where one is required."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("LIGHTNING_FEED_REQUIRE_GPU") == "1":
        pytest.fail("LIGHTNING_FEED_REQUIRE_GPU=1, and torch sees no CUDA device", pytrace=False)
    pytest.skip("no CUDA device")


def pytest_sessionfinish() -> None:
    """A fit that ends with an error leaves its progress bar open, which would draw itself below pytest's summary."""
    if "tqdm" not in sys.modules:
        return
    from tqdm.std import tqdm

    for bar in [thing for thing in gc.get_objects() if issubclass(type(thing), tqdm)]:  # isinstance asks proxies
        bar.disable = True
