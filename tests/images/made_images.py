"""A set of made images: every kind that the decoders are held to Pillow on, and what is no whole image."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, PngImagePlugin

HEIGHT, WIDTH = 61, 47  # odd, and no multiple of an MCU


def waves(channels: int = 3, height: int = HEIGHT, width: int = WIDTH) -> npt.NDArray[np.uint8]:
    """A smooth image, other in each channel."""
    rows, columns = np.mgrid[:height, :width]
    planes = [127 + 120 * np.sin(columns / (9 + band) + rows / (13 - band)) for band in range(channels)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The file's bytes."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def pillow_pixels(data: bytes) -> npt.NDArray[np.uint8]:
    """What torchvision's ImageFolder makes of it."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _whole() -> dict[str, bytes]:
    colour = Image.fromarray(waves())
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned by 90 degrees
    corrected = PngImagePlugin.PngInfo()
    corrected.add(b"gAMA", (45455 * 2).to_bytes(4, "big"))
    jpeg = encoded(colour, quality=90)
    return {
        "colour": jpeg,
        "greyscale": encoded(colour.convert("L")),
        "CMYK": encoded(Image.fromarray(waves(4), "CMYK"), quality=90),
        "EXIF-rotated": encoded(colour, exif=turned),
        "progressive": encoded(colour, progressive=True),
        "4:4:4": encoded(colour, subsampling=0),
        "4:2:2": encoded(colour, subsampling=1),
        "RGB inside": encoded(colour, keep_rgb=True),
        "one pixel": encoded(Image.fromarray(waves(3, 1, 1))),
        "one row": encoded(Image.fromarray(waves(3, 1, 100))),
        "restart markers": encoded(colour, restart_marker_blocks=2),
        "bytes after the end": jpeg + b"and more",
        "palette PNG": encoded(colour.quantize(16), "PNG"),
        "palette PNG with a clear colour": encoded(colour.quantize(16), "PNG", transparency=3),
        "RGBA PNG": encoded(Image.fromarray(waves(4), "RGBA"), "PNG"),
        "RGB PNG": encoded(colour, "PNG"),
        "PNG with gamma": encoded(colour, "PNG", pnginfo=corrected),
        "grey and alpha PNG": encoded(Image.fromarray(waves(2), "LA"), "PNG"),
        "16 bit PNG": encoded(Image.fromarray(waves(1)[..., 0].astype(np.uint16) * 256), "PNG"),
        "1 bit PNG": encoded(colour.convert("1"), "PNG"),
        "WebP": encoded(colour, "WEBP", quality=80),
        "lossless RGBA WebP": encoded(Image.fromarray(waves(4), "RGBA"), "WEBP", lossless=True),
        "animated WebP": encoded(
            colour, "WEBP", save_all=True, append_images=[Image.fromarray(waves()[::-1].copy())], duration=10
        ),
        "GIF": encoded(colour, "GIF"),
        "BMP": encoded(colour, "BMP"),
        "TIFF": encoded(colour, "TIFF"),
    }


def _broken() -> dict[str, bytes]:
    jpeg, progressive, png = WHOLE["colour"], WHOLE["progressive"], WHOLE["RGBA PNG"]
    return {
        "0 bytes": b"",
        "2 bytes": jpeg[:2],
        "text named .jpg": b"this is no image\n" * 20,
        "JPEG cut in the header": jpeg[:40],
        "JPEG cut in the middle": jpeg[: len(jpeg) // 2 + 200],
        "JPEG cut shortly before the end": jpeg[:-30],
        "progressive JPEG cut": progressive[: len(progressive) * 2 // 3],
        "PNG cut": png[: len(png) * 2 // 3],
        "PNG cut in the header": png[:20],
        "JPEG that is all header": b"\xff\xd8\xff" + bytes(200),
    }


WHOLE = _whole()
"""Name -> bytes of an image that Pillow reads."""
BROKEN = _broken()
"""Name -> bytes that Pillow refuses."""
