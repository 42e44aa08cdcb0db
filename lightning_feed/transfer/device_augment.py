"""RandomResizedCrop and flip of a whole batch on its device: one box per image, without a loop over images."""

import math

import torch
from torch import Tensor
from torch.nn import functional

_TRIES = 10


def draw_boxes(
    aspects: Tensor,
    *,
    generator: torch.Generator,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Draw boxes as torchvision's RandomResizedCrop does: uniform area, log-uniform aspect, uniform position.

    Like torchvision, try up to ten boxes until one fits into the image. All ten are drawn at once, because checking
    each would wait for the device. If none fits, the first is clipped to the image.

    Args:
        aspects: float, shape (B,): original width / height of each image, before it was stretched to a square.
        generator: on the same device as ``aspects``.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width / height of the box.

    Returns:
        float32, shape (B, 4): top, left, height, width as shares of the image's height and width.
    """
    draws = torch.rand((2, _TRIES, len(aspects)), generator=generator, device=generator.device)
    area = scale[0] + (scale[1] - scale[0]) * draws[0]
    # Boxes are in shares of a stretched image's sides, so their aspect is divided by the image's aspect.
    aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * draws[1]) / aspects
    widths = (area * aspect).sqrt()
    heights = (area / aspect).sqrt()
    fits = (widths <= 1) & (heights <= 1)
    order = torch.arange(_TRIES, 0, -1, device=fits.device)[:, None]
    first = (fits * order).argmax(0, keepdim=True)
    width = widths.gather(0, first)[0].clamp(max=1.0)
    height = heights.gather(0, first)[0].clamp(max=1.0)
    position = torch.rand((2, len(aspects)), generator=generator, device=generator.device)
    return torch.stack([(1 - height) * position[0], (1 - width) * position[1], height, width], dim=1)


def crop_and_flip(images: Tensor, boxes: Tensor, flipped: Tensor, size: int) -> Tensor:
    """Cut a box out of each image, flip some, and resize all to one size (bilinear, without antialiasing).

    Args:
        images: uint8 or float, shape (B, C, H, W).
        boxes: from :func:`draw_boxes`, shape (B, 4).
        flipped: bool, shape (B,).
        size: height and width of the result, in pixels.

    Returns:
        float32 of shape (B, C, size, size), in the value range of ``images``.
    """
    top, left, height, width = boxes.unbind(1)
    sign = torch.where(flipped, -1.0, 1.0)
    zero = torch.zeros_like(top)
    # affine_grid's coordinates go from -1 to 1 over the image, so a box's middle is at 2 * (left + width / 2) - 1.
    theta = torch.stack(
        [
            torch.stack([width * sign, zero, 2 * left + width - 1], dim=1),
            torch.stack([zero, height, 2 * top + height - 1], dim=1),
        ],
        dim=1,
    )
    grid = functional.affine_grid(theta, [len(images), images.shape[1], size, size], align_corners=False)
    return functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
