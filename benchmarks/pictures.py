"""JPEGs to decode where there are no others: of the size of ImageNet's, and about as dear to decode."""

import io

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375
_QUALITY = 90
_CONTRAST = (15.0, 50.0)
"""Least and most, of the coarsest part. With these the files have 100 kB in the mean, about as those of ImageNet."""
_FINENESS = 0.95
"""Contrast of each part to that of the one before it, whose grain is twice as large."""


def make_picture(seed: int) -> bytes:
    """Clouds: noise at all scales, the finer the fainter, each colour a little other than the rest."""
    random = np.random.default_rng(seed)
    colours = np.full((HEIGHT, WIDTH, 3), 128.0)
    contrast, cells = random.uniform(*_CONTRAST), 3
    while cells < WIDTH:
        common, own = random.normal(size=(cells, cells, 1)), random.normal(size=(cells, cells, 3))
        colours += contrast * _enlarged(common + 0.3 * own)
        contrast, cells = contrast * _FINENESS, 2 * cells
    file = io.BytesIO()
    Image.fromarray(colours.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _enlarged(cells: np.ndarray) -> np.ndarray:
    parts = [Image.fromarray(cells[..., k].astype(np.float32)).resize((WIDTH, HEIGHT), 3) for k in range(3)]
    return np.stack([np.asarray(part) for part in parts], axis=-1)
