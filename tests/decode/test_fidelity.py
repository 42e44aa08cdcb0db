"""PSNR against scikit-image's, and its corners."""

import math

import numpy as np
import pytest
from skimage.metrics import peak_signal_noise_ratio

from lightning_feed.decode.fidelity import psnr_db


def test_as_scikit_image_has_it() -> None:
    draw = np.random.default_rng(0)
    for spread in (1, 5, 100):
        image = draw.integers(0, 256, (40, 30, 3), dtype=np.uint8)
        other = np.clip(image.astype(int) + draw.integers(-spread, spread + 1, image.shape), 0, 255).astype(np.uint8)
        assert psnr_db(image, other) == pytest.approx(peak_signal_noise_ratio(image, other), rel=1e-9)


def test_same_and_opposite() -> None:
    black, white = np.zeros((3, 3, 3), np.uint8), np.full((3, 3, 3), 255, np.uint8)
    assert psnr_db(black, black) == math.inf
    assert psnr_db(white, black) == psnr_db(black, white) == 0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2, 3\) and \(1, 2, 3\) cannot be compared"):
        psnr_db(np.zeros((2, 2, 3), np.uint8), np.zeros((1, 2, 3), np.uint8))
