"""A batch cropped on its device: the boxes of torchvision's distribution, the pixels of an obvious crop and resize."""

import pytest
import torch
from torch.nn import functional
from torchvision.transforms import RandomResizedCrop

from lightning_feed.transfer.device_augment import crop_and_flip, draw_boxes


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(side: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator(1))


def test_a_box_of_the_whole_image_returns_the_image_or_its_mirror() -> None:
    images = picture()[None]
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    torch.testing.assert_close(
        crop_and_flip(images, whole, torch.tensor([False]), 32), images.float(), atol=1e-2, rtol=0
    )
    mirrored = crop_and_flip(images, whole, torch.tensor([True]), 32)
    torch.testing.assert_close(mirrored, images.flip(-1).float(), atol=1e-2, rtol=0)


def test_each_image_is_cropped_to_its_own_box() -> None:
    images = torch.stack([picture(), picture()])
    boxes = torch.tensor([[0.25, 0.5, 0.5, 0.25], [0.0, 0.25, 0.75, 0.5]])
    found = crop_and_flip(images, boxes, torch.tensor([False, True]), 16)
    cut = images[0, :, 8:24, 16:24], images[1, :, 0:24, 8:24].flip(-1)
    for made, obvious in zip(found, cut, strict=True):
        expected = functional.interpolate(obvious[None].float(), (16, 16), mode="bilinear", align_corners=False)[0]
        # At the edge of a box, the grid looks at the pixel beside it, and a cut image has none.
        torch.testing.assert_close(made[:, 1:-1, 1:-1], expected[:, 1:-1, 1:-1], atol=1e-2, rtol=0)


@pytest.mark.parametrize("image_aspect", [0.5, 1.0, 1.6])
def test_boxes_lie_inside_and_have_the_requested_areas_and_aspects(image_aspect: float) -> None:
    aspects = torch.full((10_000,), image_aspect)
    boxes = draw_boxes(aspects, generator=generator(), scale=(0.1, 0.3), ratio=(0.75, 1.5))
    top, left, height, width = boxes.unbind(1)
    assert (boxes >= 0).all()
    assert (top + height <= 1 + 1e-6).all()
    assert (left + width <= 1 + 1e-6).all()
    whole = (height < 1) & (width < 1)  # not cut to the image
    assert whole.all()
    area = (height * width)[whole]
    aspect = (width / height * aspects)[whole]
    assert area.min() >= 0.1 - 1e-5
    assert area.max() <= 0.3 + 1e-5
    assert aspect.min() >= 0.75 - 1e-4
    assert aspect.max() <= 1.5 + 1e-4


def test_boxes_have_the_mean_and_spread_of_torchvisions() -> None:
    torch.manual_seed(0)
    shape = torch.empty(()).expand(3, 375, 500)
    theirs = torch.tensor([RandomResizedCrop.get_params(shape, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    theirs = theirs / torch.tensor([375, 500, 375, 500])
    ours = draw_boxes(torch.full((4000,), 500 / 375), generator=generator())
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(ours.std(0), theirs.std(0), atol=0.01, rtol=0)


def test_boxes_depend_only_on_the_seed() -> None:
    square = torch.ones(5)
    assert torch.equal(draw_boxes(square, generator=generator(3)), draw_boxes(square, generator=generator(3)))
    assert not torch.equal(draw_boxes(square, generator=generator(3)), draw_boxes(square, generator=generator(4)))
