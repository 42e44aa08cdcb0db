"""What is taken of a picture, drawn before it is decoded: so that any backend can decode, and all take the same."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from lightning_feed.decode.decoders import Region
from lightning_feed.decode.resize import resize
from lightning_feed.load.picture import DecodedPicture, EncodedPicture

Picture: TypeAlias = "EncodedPicture | DecodedPicture"
Quality: TypeAlias = Literal["exact", "near", "fast"]
QUALITIES: tuple[Quality, ...] = ("exact", "near", "fast")
"""``"exact"``: the pixels of torchvision's antialiased uint8 resize. ``"near"``: decoded at a smaller scale that
still has twice the pixels each way, then the same resize. ``"fast"``: at the smallest that has as many, and resized
without antialiasing. How far each is from the first is measured in docs/reference/decoders.md."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A box of the picture, resized, of which a window is kept, mirrored or not."""

    region: Region
    """Of the picture as it is stored."""
    resized: tuple[int, int]
    """(height, width) that the region is brought to."""
    window: Region
    """What is kept of that."""
    flipped: bool
    """Whether left and right change places."""


def cut_out(picture: Picture, cut: Cut, quality: Quality) -> torch.Tensor:
    """The pixels of a cut: uint8, shape (3, height, width) of its window, channels last in memory."""
    cover = {
        "exact": None,
        "near": (2 * cut.resized[0], 2 * cut.resized[1]),  # at once, the antialiasing would be left to the decoder
        "fast": cut.resized,
    }[quality]
    pixels = picture.region(cut.region, cover=cover)
    image = resize(pixels, cut.resized, fidelity="linear" if quality == "fast" else "exact")
    top, left, height, width = cut.window
    kept = image[..., top : top + height, left : left + width]
    return kept.flip(-1) if cut.flipped else kept
