"""What tests of DALI share: photographs in folders, how far batches are apart, and the splits that have a pipeline."""

import math
from pathlib import Path

import torch
from torch import Tensor

from lightning_feed import ImageFolderDataModule


def write(root: Path, **splits: list[bytes]) -> Path:
    """JPEGs in two class folders of each split."""
    for split, files in splits.items():
        for index, data in enumerate(files):
            folder = root / split / "ab"[index % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index}.jpg").write_bytes(data)
    return root


def active_in(module: ImageFolderDataModule) -> tuple[str, ...]:
    """The splits that have a pipeline now."""
    return tuple(
        sorted(split for split, decoder in module._images_run.pipelines.items() if decoder._pipeline is not None)
    )


def steps_off(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far normalised images are apart, in steps of uint8."""
    return (ours - theirs).abs() * 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def assert_nearly_the_same(
    ours: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]], db: float = 35
) -> None:
    assert len(ours) == len(theirs) > 0
    for (images, labels), (expected, true_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(labels, true_labels)
        assert images.shape == expected.shape
        for one, other in zip(images, expected, strict=True):
            assert 10 * math.log10(255**2 / max(steps_off(one, other).pow(2).mean().item(), 1e-9)) > db
