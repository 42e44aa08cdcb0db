"""Decodes batches on their target device: JPEGs in bulk with nvJPEG, other images on the CPU."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchvision.io import ImageReadMode

from lightning_feed.errors import DecodeError, LoaderError, MissingExtraError
from lightning_feed.images.crop import CropSpec, Quality
from lightning_feed.images.decoders import Region, refuse_bomb
from lightning_feed.images.header import FRAME_HEADERS, JPEG, Encoded, as_array, ends_like_jpeg, jpeg_segments, kind_of
from lightning_feed.images.image_dataset import EncodedBatch, EncodedSample, ImageDataset, decode_on_cpu, decode_rest
from lightning_feed.load import machine
from lightning_feed.load.trace import traced

_BASELINE = 0xC0
_PROGRESSIVE = 0xC2
_APP14 = 0xEE
_SCAN = 0xDA
_GREY = 1
_COLOUR = 3
_SUBSAMPLINGS: Final = frozenset({(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (4, 2)})
"""(horizontal, vertical) luma factors, with chroma (1, 1): 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:1:0."""


class NvJpeg:
    """Decodes lists of JPEGs on one CUDA device; one object serves the whole process.

    torchcodec, the successor of torchvision's decoders, is not used: it always applies the EXIF rotation (read in
    0.17), while all other decoders here leave images as stored.

    Raises:
        MissingExtraError: if this torchvision was built without nvJPEG.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._decode: Any = torch.ops.image.decode_jpegs_cuda
        except AttributeError as error:
            raise _without_nvjpeg() from error
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        """Decode, and wait on the host until nvJPEG is done, as torchvision does. The files may be freed afterwards.

        Args:
            files: whole JPEGs: uint8, shape (bytes,), on the host.

        Returns:
            uint8, shape (3, height, width), safe to use on the current stream.

        Raises:
            RuntimeError: if any file cannot be decoded; the error does not say which.
        """
        # torchvision allocates the images on the current stream, but nvJPEG writes them on its own stream, which does
        # not wait for the current one; the hardware decoder waits for no stream at all (github.com/pytorch/vision
        # pull 9606, meta-pytorch/torchcodec pull 1634). So nvJPEG may write to memory that was freed on the current
        # stream while kernels queued there still read it. Therefore:
        # 1. Allocate the images on a stream without queued work: memory freed there is not in use. Usually the stream
        #    is empty. But torch hands out 32 streams in turn, so another part of the program may share this one; the
        #    host waits for that part's work. It waits for an event, because torch.cuda.set_sync_debug_mode, which users
        #    set to find their own waits, would raise at Stream.synchronize.
        # 2. The current stream, not the host, waits for this stream.
        # 3. record_stream: the memory returns to this stream only when the current stream has finished with the images.
        self._stream.record_event().synchronize()
        current = self._module.current_stream(self._device)
        try:
            with self._module.stream(self._stream):
                images: list[Tensor] = self._decode(files, ImageReadMode.RGB.value, self._device)
        except RuntimeError as error:
            if "not compiled with nvJPEG" in str(error):
                raise _without_nvjpeg() from error
            raise
        current.wait_stream(self._stream)
        for image in images:
            image.record_stream(current)
        return images


@lru_cache
def nvjpeg(device: torch.device) -> NvJpeg:
    """Return the device's decoder. Cached, because each new stream would leave a memory pool behind.

    Raises:
        MissingExtraError: if this torchvision was built without nvJPEG.
    """
    return NvJpeg(device)


def not_for_nvjpeg(data: Encoded) -> str | None:
    """Return the reason why nvJPEG cannot decode a file. Returns None if nvJPEG can.

    nvJPEG decodes 8-bit baseline and progressive JPEGs, grey or colour, in the usual chroma subsamplings
    (https://docs.nvidia.com/cuda/nvjpeg/). One unsupported file makes the call fail for the whole list, or is decoded
    in wrong colours; a truncated file may come out half grey, while other decoders refuse it.

    Args:
        data: the encoded image.

    Returns:
        A reason that is the same for all images of one kind.
    """
    kind = kind_of(data)
    if kind != JPEG:
        return f"nvJPEG decodes only JPEG, and the image is of the kind {kind}"
    if not ends_like_jpeg(data):
        return "the JPEG does not end with its end marker: it is cut short, or has data after it"
    frame = _read_frame(as_array(data).data)
    if frame is None:
        return "the JPEG has no frame header"
    if frame.marker not in (_BASELINE, _PROGRESSIVE) or frame.bits != 8:
        return "nvJPEG decodes only 8-bit baseline and progressive JPEGs, not others (12 bits, lossless, ...)"
    if len(frame.sampling) == _GREY:
        return None
    if len(frame.sampling) != _COLOUR:
        return "nvJPEG does not convert CMYK JPEGs to RGB"
    if frame.holds_rgb:
        return "the JPEG holds RGB, but nvJPEG reads it as YCbCr"
    luma, *chroma = frame.sampling
    if luma not in _SUBSAMPLINGS or chroma != [(1, 1), (1, 1)]:
        return "nvJPEG does not support the JPEG's chroma subsampling"
    return None


class _Frame(NamedTuple):
    """Values from the frame header of a JPEG, and the colour space, which an Adobe segment may declare."""

    marker: int
    """The kind of JPEG."""
    bits: int
    """Bits of a sample."""
    sampling: Sequence[tuple[int, int]]
    """(horizontal, vertical) sampling factors of each component."""
    holds_rgb: bool
    """True if the components are R, G and B."""


def _read_frame(data: memoryview) -> _Frame | None:
    """Read the frame header. Returns None if it is missing or cut short.

    Its bytes (T.81, B.2.2): bits, height (2 bytes), width (2 bytes), number of components; then for each component: id,
    sampling factors, table.
    """
    frame = 0
    header = data[:0]
    is_untransformed = False
    for marker, start, end in jpeg_segments(data):
        if marker == _SCAN:
            break
        if marker in FRAME_HEADERS:
            frame = marker
            header = data[start:end]
        elif marker == _APP14 and bytes(data[start : start + 5]) == b"Adobe" and start + 12 <= min(end, len(data)):
            is_untransformed = data[start + 11] == 0
    if len(header) < 6 or len(header) < 6 + 3 * header[5]:
        return None
    components = header[6 : 6 + 3 * header[5]]
    return _Frame(
        marker=frame,
        bits=header[0],
        sampling=[(factors >> 4, factors & 15) for factors in components[1::3]],
        holds_rgb=is_untransformed or bytes(components[0::3]) == b"RGB",
    )


def _without_nvjpeg() -> MissingExtraError:
    return MissingExtraError(
        'backend="nvjpeg" needs a torchvision that was built with nvJPEG, and this one was not (it is a CPU build, '
        "or too new). Install the build for your CUDA:  pip install torchvision --index-url "
        f"https://download.pytorch.org/whl/cu{(torch.version.cuda or '130').replace('.', '')}"
    )


DecodeJpegs: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""Decodes whole JPEGs (uint8, (bytes,), on the host) to uint8 (3, H, W) on the device. Raises a RuntimeError if any of
them fails."""
MOST_BYTES: Final = 256 * 2**20
"""Limit for decoded full-size pixels, and separately for the memory of resizing. Larger batches are split: otherwise a
batch of 12-megapixel photographs would take 10 GB."""
_NO_MEMORY: Final = re.compile(r"Failed to [\w ]+: 5\b")
"""torchvision's message for NVJPEG_STATUS_ALLOCATOR_FAILURE (docs.nvidia.com/cuda/nvjpeg, return codes)."""
_FAILED: Final = "nvJPEG failed on the JPEG"


def decode_batch(batch: EncodedBatch, dataset: ImageDataset, decode: DecodeJpegs | None = None) -> Any:
    """Decode to [images, labels] on ``batch.device``: uint8, shape (B, 3, H, W), channels last; and int64, shape (B,).

    On a CUDA device all work goes to the current stream, and the host waits only for nvJPEG. Images that nvJPEG cannot
    decode are decoded by the CPU in this process, and counted in ``dataset.cpu_fallback``. ``quality="near"`` equals
    ``"exact"``: nvJPEG cannot decode at smaller scales. On other devices the result is the same as with
    ``backend="torch"``.

    Args:
        batch: the encoded images.
        dataset: the dataset of the batch.
        decode: function to use instead of nvJPEG; None for nvJPEG.

    Raises:
        DatasetError: if an image cannot be decoded, and ``on_error`` does not handle it. Names the image.
        MissingExtraError: if this torchvision was built without nvJPEG.
        LoaderError: if nvJPEG fails on every file.
    """
    if decode is None:
        if batch.device.type not in machine.DECODING_BACKENDS:
            return decode_on_cpu(batch, dataset)
        decode = nvjpeg(batch.device)
    images = batch.images()
    _, _, height, width = images[0].crop.window
    # Filled image by image, channels last: no stacking or transposing afterwards.
    pixels = torch.empty((len(images), height, width, 3), dtype=torch.uint8, device=batch.device)
    for_the_cpu = _decode_on_device(images, dataset, decode, pixels)
    decoded = pixels.permute(0, 3, 1, 2)
    labels = batch.labels
    if for_the_cpu:
        labels = decode_rest(for_the_cpu, images, dataset, decoded).to(labels.device, non_blocking=True)
    return [decoded, labels]


def _decode_on_device(
    images: list[EncodedSample], dataset: ImageDataset, decode: DecodeJpegs, pixels: Tensor
) -> list[int]:
    """Decode into ``pixels`` all images that the device can decode. Return the positions of the others in the batch."""
    for_the_cpu: list[int] = []
    for_the_device: list[int] = []
    for position, image in enumerate(images):
        reason = dataset.cpu_fallback.known.get(image.index) or _refusal(image)
        if reason is None:
            for_the_device.append(position)
        else:
            for_the_cpu.append(position)
            dataset.cpu_fallback.add(reason, dataset.source.name(image.index))
    for part in _parts(for_the_device, images):
        for_the_cpu += _decode_part(part, images, dataset, decode, pixels)
    return sorted(for_the_cpu)


def _decode_part(
    part: list[int], images: list[EncodedSample], dataset: ImageDataset, decode: DecodeJpegs, pixels: Tensor
) -> list[int]:
    """Decode the images at the positions of ``part`` into ``pixels``. Return those that the device cannot decode.

    A separate function, so that its return frees the full-size images.
    """
    decoded = dict(zip(part, _decode_many([images[position] for position in part], dataset, decode), strict=True))
    wholes = {position: whole for position, whole in decoded.items() if whole is not None}
    if wholes:
        crops = {position: images[position].crop for position in wholes}
        crop_on_device(wholes, crops, dataset.crop_recipe.quality, pixels)
    return [position for position, whole in decoded.items() if whole is None]


def _decode_many(images: list[EncodedSample], dataset: ImageDataset, decode: DecodeJpegs) -> list[Tensor | None]:
    """Decode the images. In the result, None stands for an image that the device cannot decode; such an image is
    recorded in ``cpu_fallback.known``."""
    files = [torch.from_numpy(image.data) for image in images]
    with traced("decode"):
        wholes, error = _try(files, decode)
        if error is not None and len(files) > 1:  # the error does not say which file failed
            alone = [_try([file], decode) for file in files]
            wholes = [whole for (whole,), _ in alone]
    fallback = dataset.cpu_fallback
    for position, (image, whole) in enumerate(zip(images, wholes, strict=True)):
        if whole is not None and whole.shape[1:] == image.size:
            fallback.worked = True
            continue
        wholes[position] = None
        fallback.known[image.index] = _FAILED
        fallback.add(_FAILED, dataset.source.name(image.index))
    if not fallback.worked and len(images) > 1:
        # No file was decoded, so the images are not at fault. Without an error, the CPU would decode them all here.
        raise LoaderError(
            f"The device decoded none of the first {len(images)} JPEGs: {error}. Check the driver "
            'and the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error
    return wholes


def _try(files: list[Tensor], decode: DecodeJpegs) -> tuple[list[Tensor | None], RuntimeError | None]:
    """Decode all files in one call. If the call fails, return None for each file, and the error.

    The error does not name the file that caused it. Errors that no file can have caused, such as too little memory, are
    raised.
    """
    try:
        return [*decode(files)], None
    except RuntimeError as error:
        text = str(error)
        # Device errors, which torchvision also raises as plain RuntimeErrors.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "CUDA error" in text:
            raise
        if _NO_MEMORY.search(text):
            raise torch.OutOfMemoryError(
                "CUDA out of memory: nvJPEG allocates memory outside of torch, and there was not enough for "
                f"{len(files)} JPEGs ({text}). Use a smaller batch_size, or limit torch: "
                "torch.cuda.set_per_process_memory_fraction."
            ) from error
        return [None] * len(files), error


def crop_on_device(
    wholes: Mapping[int, Tensor], crops: Mapping[int, CropSpec], quality: Quality, pixels: Tensor
) -> None:
    """Cut boxes out of whole images, resize them (bilinear, as torchvision), and write them into a batch.

    Resizes by matrix products: torch resizes images of different sizes one by one, with ten kernels each. A resized box
    is ``R @ box @ C.T``; R and C hold the weight of each box pixel for each output line and column. This takes one
    kernel per image, and about forty for each group of images that fits into ``MOST_BYTES``.

    The matrices are float16, which is exact for grey levels; the weights are off by up to 1/4096. Before rounding, the
    result is off by less than a third of a grey level (measured), so it ends within one level of torchvision's. TF32,
    which ``torch.set_float32_matmul_precision`` allows for float32, is no more precise and takes twice the memory.

    ``quality="fast"`` omits the antialiasing if an image shrinks by a factor of 2 or less. The CPU always omits it,
    because it decodes at a smaller scale first. Always omitting it here, from whole images, would be less accurate (26
    dB from ``"exact"`` instead of the CPU's 33 dB, measured on 60 photographs 6 to 11 times as large as the result).

    Args:
        wholes: images by their position in the batch: uint8, shape (3, H, W).
        crops: the crop of each image, by the same positions.
        quality: resize quality.
        pixels: the batch: uint8, shape (B, height, width, 3), the height and width of all windows.
    """
    _, height, width, _ = pixels.shape
    groups = list(_groups(crops, height, width))
    rows = [_numbers(position, crops[position], quality) for group, _, _ in groups for position in group]
    # One copy from pinned memory, so that the host does not wait for it.
    host = torch.tensor(rows, dtype=torch.float32, device="cpu", pin_memory=pixels.device.type != "cpu")
    table = host.to(pixels.device, non_blocking=True)
    tables = table.split([len(group) for group, _, _ in groups])
    for (group, high, wide), numbers in zip(groups, tables, strict=True):
        boxes = {position: (wholes[position], crops[position].region) for position in group}
        _resize_group(boxes, (high, wide), numbers, pixels)


def _resize_group(
    group: Mapping[int, tuple[Tensor, Region]], sides: tuple[int, int], numbers: Tensor, pixels: Tensor
) -> None:
    """Cut out and resize boxes no larger than ``sides``, and write them into ``pixels``.

    A separate function, so that its return frees memory for the next group.
    """
    _, height, width, _ = pixels.shape
    high, wide = sides
    # The channel axis is between lines and columns, so both are plain matrix products.
    boxes = torch.zeros((len(group), high, 3, wide), dtype=torch.float16, device=pixels.device)
    for box, (whole, region) in zip(boxes.unbind(), group.values(), strict=True):
        _copy_box(whole, region, box)
    lines = _product(_weights(numbers[:, 1:5], height, high), boxes.flatten(2))
    columns = _weights(numbers[:, 5:9], width, wide).transpose(1, 2)
    made = _product(lines.view(len(group), 3 * height, wide), columns)
    # Clamped, since a GPU may accumulate in float16: a rounded 256 would wrap to black.
    levels = made.round_().clamp_(max=255).to(torch.uint8).view(len(group), height, 3, width)
    pixels.index_copy_(0, numbers[:, 0].long(), levels.transpose(2, 3))


def _groups(crops: Mapping[int, CropSpec], height: int, width: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield groups of boxes of similar size: the boxes' positions in the batch, and a height and width that are large
    enough for each box. Resizing a group takes at most ``MOST_BYTES``, unless the group is a single box."""
    group: list[int] = []
    high = wide = 0
    for position in sorted(crops, key=lambda position: crops[position].region[2:]):
        _, _, *sides = crops[position].region
        higher, wider = (_aligned(max(pair)) for pair in zip((high, wide), sides, strict=True))
        # 6 bytes each: three channels of float16, and weights that are float32 and then float16.
        each = 6 * (higher * wider + height * wider + height * width + height * higher + width * wider)
        if group and (len(group) + 1) * each > MOST_BYTES:
            yield group, high, wide
            group = []
            higher, wider = map(_aligned, sides)
        group.append(position)
        high = higher
        wide = wider
    if group:
        yield group, high, wide


def _aligned(side: int) -> int:
    """Round up to a multiple of 8: tensor cores are slower on other float16 matrices."""
    return -(-side // 8) * 8


def _product(left: Tensor, right: Tensor) -> Tensor:
    # With `out`, autocast does not apply. It would use bfloat16, which is less precise.
    return torch.bmm(left, right, out=left.new_empty(0))


def _numbers(position: int, crop: CropSpec, quality: Quality) -> list[float]:
    """Return a row of the table: the position; then for lines and for columns: the box's size, the centre of the first
    output pixel in the box, the distance between centres, and 1 / (filter radius in box pixels)."""
    region = crop.region
    window = crop.window
    antialias = quality != "fast" or _shrink(crop) > 2
    across = (window.left, 1)
    if crop.flipped:
        across = (window.left + window.width - 1, -1)
    row: list[float] = [position]
    for side, resized, first, step in (
        (region.height, crop.resized[0], window.top, 1),
        (region.width, crop.resized[1], *across),
    ):
        scale = side / resized
        radius = max(scale, 1) if antialias else 1
        row += [side, scale * (first + 0.5) - 0.5, scale * step, 1 / radius]
    return row


def _weights(numbers: Tensor, results: int, side: int) -> Tensor:
    """Return the weights of ``side`` pixels for each output pixel: float16, shape (B, results, side).

    A triangular filter around the centre of the output pixel, as in torch's own kernels.
    """
    sides, first, step, sharpness = numbers[:, :, None].unbind(1)
    middles = torch.addcmul(first, step, torch.arange(results, dtype=torch.float32, device=numbers.device))
    inputs = torch.arange(side, dtype=torch.float32, device=numbers.device)
    weights = inputs - middles[:, :, None]
    weights.abs_().mul_(-sharpness[:, :, None]).add_(1).clamp_(min=0)
    weights.masked_fill_((inputs >= sides)[:, None], 0)  # beyond the box
    return weights.div_(weights.sum(2, keepdim=True)).half()


def _copy_box(whole: Tensor, region: Region, box: Tensor) -> None:
    """Copy a region of an image into the corner of a box of shape (high, 3, wide)."""
    # Two views and one kernel; slicing and permuting would take seven calls per image.
    top, left, height, width = region
    channel, line, column = whole.stride()
    start = whole.storage_offset() + top * line + left * column
    part = whole.as_strided((height, 3, width), (line, channel, column), start)
    box.as_strided((height, 3, width), box.stride()).copy_(part)


def _refusal(image: EncodedSample) -> str | None:
    try:
        refuse_bomb(*image.size)
    except DecodeError:
        return "the image is too large, or its header is broken"
    return not_for_nvjpeg(image.data)


def _shrink(crop: CropSpec) -> float:
    return max(crop.region.height / crop.resized[0], crop.region.width / crop.resized[1])


def _parts(positions: list[int], images: list[EncodedSample]) -> Iterator[list[int]]:
    """Split positions in order into parts of at most ``MOST_BYTES`` of pixels, with at least one image each."""
    part: list[int] = []
    size = 0
    for position in positions:
        height, width = images[position].size
        more = 3 * height * width
        if part and size + more > MOST_BYTES:
            yield part
            part = []
            size = 0
        part.append(position)
        size += more
    if part:
        yield part
