"""Resizing of uint8 pixels to the size that the model takes."""

from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_feed.decode.decoders import Pixels, open_cv2

FIDELITIES: Final = ("exact", "linear")


def resize(pixels: Pixels, size: tuple[int, int], *, fidelity: Literal["exact", "linear"] = "exact") -> Tensor:
    """Resize an image bilinearly.

    Args:
        pixels: uint8, (H, W, 3). A box cut out of a larger image need not be copied first.
        size: (height, width) of the result.
        fidelity: ``"exact"`` is torchvision's antialiased resize of uint8, which is Pillow's within a grey level.
            ``"linear"`` is OpenCV's, without antialiasing: about half the time, the same where it enlarges, and
            further from Pillow the more it shrinks.

    Returns:
        uint8, shape (3, height, width), the channels last in memory.

    Raises:
        MissingExtraError: ``"linear"`` without OpenCV.
        ValueError: for another fidelity.
    """
    if fidelity == "linear":
        cv2, _ = open_cv2()
        return torch.from_numpy(cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_LINEAR)).permute(2, 0, 1)
    if fidelity != "exact":
        raise ValueError(f"fidelity={fidelity!r} is not known. Choose one of {', '.join(map(repr, FIDELITIES))}.")
    # Writeable: torch warns about memory that must not be written to, such as a cache's, though nothing here writes.
    batch = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))[None].permute(0, 3, 1, 2)
    # As a batch in channels last: torch's AVX2 code for uint8 then takes and gives pixels as they lie. With any other
    # strides, also of the one image in the batch, it unpacks planes, gives planes, and takes half as long again.
    return interpolate(batch, size=list(size), mode="bilinear", antialias=True, align_corners=False)[0]
