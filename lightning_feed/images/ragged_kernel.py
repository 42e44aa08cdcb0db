"""The kernel that makes one batch of crops from images of different sizes, in Triton. Import it only with Triton."""

import triton
import triton.language as tl

ROWS = 8
COLUMNS = 32
"""Size of the block of output pixels that one program makes."""


@triton.jit  # type: ignore[untyped-decorator]  # what is compiled has no types of Python
def crop_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    images,  # int64 (B,): addresses of uint8 images of shape (3, H, W)
    boxes,  # int32 (B, 7): height, width of the image; top, left, height, width of the box; position in the batch
    filters,  # float32 (B, 6): for lines, then columns: centre of the first output pixel, step, radius, in box pixels
    scaling,  # float32 (2, 3): scale and offset of the three channels
    out,  # (B, height, width, 3)
    height,
    width,
    NORMALIZE: tl.constexpr,  # Triton's usual spelling of constants
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Crop, resize with an antialiasing triangular filter, flip, and normalize. One program makes a block of pixels.

    A weighted mean over all pixels under the filter, as in Pillow and torch. The sum goes over lines and columns
    together: each pixel of the box is read four times, whatever the scale is, and mostly from the cache.
    """
    image = tl.program_id(0)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(images + image).to(tl.pointer_type(tl.uint8))
    box = boxes + 7 * image
    image_height = tl.load(box).to(tl.int64)
    image_width = tl.load(box + 1).to(tl.int64)
    top = tl.load(box + 2)
    left = tl.load(box + 3)
    box_height = tl.load(box + 4)
    box_width = tl.load(box + 5)
    position = tl.load(box + 6).to(tl.int64)
    filter_ = filters + 6 * image
    y_first = tl.load(filter_)
    y_step = tl.load(filter_ + 1)
    y_radius = tl.load(filter_ + 2)
    x_first = tl.load(filter_ + 3)
    x_step = tl.load(filter_ + 4)
    x_radius = tl.load(filter_ + 5)

    y_centre = y_first + y_step * y.to(tl.float32)
    x_centre = x_first + x_step * x.to(tl.float32)
    y_begin = tl.floor(y_centre - y_radius).to(tl.int32) + 1
    x_begin = tl.floor(x_centre - x_radius).to(tl.int32) + 1
    plane = image_height * image_width
    red = tl.full((ROWS, COLUMNS), 0, tl.float32)
    green = tl.full((ROWS, COLUMNS), 0, tl.float32)
    blue = tl.full((ROWS, COLUMNS), 0, tl.float32)
    total = tl.full((ROWS, COLUMNS), 0, tl.float32)
    for i in range(tl.floor(2 * y_radius).to(tl.int32) + 1):
        line = y_begin + i
        y_weight = tl.maximum(1 - tl.abs(line.to(tl.float32) - y_centre) / y_radius, 0)
        y_weight = tl.where((line >= 0) & (line < box_height), y_weight, 0)
        in_line = (top + line).to(tl.int64) * image_width + left
        for j in range(tl.floor(2 * x_radius).to(tl.int32) + 1):
            column = x_begin + j
            x_weight = tl.maximum(1 - tl.abs(column.to(tl.float32) - x_centre) / x_radius, 0)
            x_weight = tl.where((column >= 0) & (column < box_width), x_weight, 0)
            weight = y_weight[:, None] * x_weight[None, :]
            counts = weight > 0
            pixel = start + in_line[:, None] + column[None, :]
            red += weight * tl.load(pixel, mask=counts, other=0).to(tl.float32)
            green += weight * tl.load(pixel + plane, mask=counts, other=0).to(tl.float32)
            blue += weight * tl.load(pixel + 2 * plane, mask=counts, other=0).to(tl.float32)
            total += weight
    # Rounded to grey levels in any case, so that values are those of an image that was resized on the CPU.
    red = tl.minimum(tl.floor(red / total + 0.5), 255)
    green = tl.minimum(tl.floor(green / total + 0.5), 255)
    blue = tl.minimum(tl.floor(blue / total + 0.5), 255)
    if NORMALIZE:
        red = red * tl.load(scaling) + tl.load(scaling + 3)
        green = green * tl.load(scaling + 1) + tl.load(scaling + 4)
        blue = blue * tl.load(scaling + 2) + tl.load(scaling + 5)
    made = out + ((position * height + y)[:, None] * width + x[None, :]) * 3
    inside = (y < height)[:, None] & (x < width)[None, :]
    kind = out.dtype.element_ty
    tl.store(made, red.to(kind), mask=inside)
    tl.store(made + 1, green.to(kind), mask=inside)
    tl.store(made + 2, blue.to(kind), mask=inside)
