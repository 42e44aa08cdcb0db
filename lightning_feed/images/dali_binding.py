"""Access to NVIDIA DALI: options, import, outputs as tensors, failures, and forked processes."""

import ctypes
import importlib
import os
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lightning_feed.errors import LoaderError, MissingExtraError, SettingsError, refuses_unknown_fields
from lightning_feed.machine.limits import Machine

_GPU_THREADS = 8
"""Maximum CPU threads beside a GPU. With ``device_memory_padding`` and ``host_memory_padding``, each thread has its own
buffers for the largest image: one on the device and two page-locked (DALI's documentation of ``fn.decoders.image``), in
total 66 MB and 89 MB for 12 megapixels."""


@refuses_unknown_fields
@dataclass(frozen=True, kw_only=True)
class DaliOptions:
    """A DALI backend with options of its own: ``backend=DaliOptions(device="gpu", threads=4)``.

    Raises:
        SettingsError: if a value is impossible, or would have no effect on the device.
    """

    device: Literal["cpu", "gpu"] = "cpu"
    """Device that decodes."""
    threads: int | Literal["auto"] = "auto"
    """CPU threads of each pipeline. ``"auto"``: one less than the CPUs of this rank; on the GPU at most 8,
    since each thread has its own buffers for the largest image."""
    prefetch: int = 2
    """Number of batches decoded ahead; each stays in memory. With ``num_workers=0``, the training process also reads
    these batches ahead, and draws their crop boxes earlier than without DALI."""
    keep_eval_pipelines: bool = False
    """True to keep the pipelines of validation, test and prediction between passes. The next pass then starts sooner,
    but they hold memory, including GPU memory, during training."""
    largest_image: tuple[int, int] | None = None
    """(height, width) in pixels of the largest image, for which the GPU decoder's buffers are allocated at the start.
    None for the largest of some images of the dataset. A larger image enlarges the buffers."""
    hw_decoder_load: float | None = None
    """Share of JPEGs for the GPU's hardware decoder, 0 to 1. None for DALI's default."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "gpu"):
            raise SettingsError(f"DaliOptions(device={self.device!r}) is not valid. Use 'cpu' or 'gpu'.")
        if self.threads != "auto":
            _check_whole("threads", self.threads)
        _check_whole("prefetch", self.prefetch)
        if self.largest_image is not None and not _is_size(self.largest_image):
            raise SettingsError(
                f"DaliOptions(largest_image={self.largest_image!r}): set (height, width) in pixels, such as "
                "(1200, 1600)."
            )
        if self.hw_decoder_load is not None and not 0 <= self.hw_decoder_load <= 1:
            raise SettingsError(f"DaliOptions(hw_decoder_load={self.hw_decoder_load!r}): set a share from 0 to 1.")
        for name in ("largest_image", "hw_decoder_load"):
            if self.device == "cpu" and vars(self)[name] is not None:
                raise SettingsError(
                    f"DaliOptions({name}={vars(self)[name]!r}) has an effect only on the GPU. Set device='gpu', or "
                    f"leave {name} out."
                )


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"DaliOptions({name}={value!r}) is not valid. Use a whole number, 1 or more.")


def _is_size(sides: tuple[int, ...]) -> bool:
    return len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)


def decode_threads(options: DaliOptions, machine: Machine, local_ranks: int = 1) -> tuple[int, str]:
    """Return the CPU threads of a pipeline, and the reason for that number.

    Args:
        options: the user's options.
        machine: the limits of this process.
        local_ranks: training processes that share the CPUs.
    """
    if options.threads != "auto":
        return options.threads, "as requested"
    share = machine.usable_cpus // max(1, local_ranks)
    reason = f"{machine.usable_cpus} {machine.cpu_reason}"
    if local_ranks > 1:
        reason += f", divided among {local_ranks} ranks"
    if options.device == "gpu" and share - 1 > _GPU_THREADS:
        return _GPU_THREADS, f"{reason}, and no more than {_GPU_THREADS} beside a GPU"
    return max(1, share - 1), f"{reason}, less one for training"


FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""Errors that DALI raises for a failed operator, by kind of failure (checked against DALI 2.4.0)."""

_NO_MEMORY = ("out of memory", "can't allocate", "bad_alloc", "allocation failed", "insufficient memory")
"""DALI's phrases for too little memory, in lower case (from the libraries of 2.4.0)."""
_OLDEST = 2  # oldest supported major version, as in the extra


def require_dali(*, gpu: bool, why: str = "Decoding with DALI") -> Any:
    """Import ``nvidia.dali``. If that fails, the error message contains the command to install it.

    Args:
        gpu: True to run on the GPU, which needs a DALI built for torch's CUDA version.
        why: the feature that needs DALI, as the subject of a sentence.

    Raises:
        MissingExtraError: if DALI is not installed, or cannot be loaded.
        SettingsError: if DALI is older than 2.0, or, for the GPU, built for another CUDA version than torch.
    """
    try:
        dali = importlib.import_module("nvidia.dali")
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("nvidia", "nvidia.dali"):
            raise MissingExtraError(f"{why} needs NVIDIA DALI. Install it:  {pip_line()}") from error
        raise MissingExtraError(
            f"{why} needs NVIDIA DALI, which is installed but cannot be loaded: {type(error).__name__}: {error}. "
            f"Install it again:  {pip_line('--force-reinstall')}"
        ) from error
    version = str(getattr(dali, "__version__", "of unknown version"))
    first = version.split(".")[0]
    if not first.isdecimal() or int(first) < _OLDEST:
        raise SettingsError(
            f"{why} needs NVIDIA DALI {_OLDEST}.0 or newer, but DALI {version} is installed. Upgrade it:  "
            f"{pip_line('--upgrade')}"
        )
    # DALI stores "12.9.86" as the number 12986 (checked in 2.4.0); its own checks use the first two digits.
    dali_cuda = str(getattr(dali, "__cuda_version__", ""))[:2]
    torch_cuda = str(torch.version.cuda).partition(".")[0]
    if gpu and torch_cuda.isdecimal() and dali_cuda.isdecimal() and torch_cuda != dali_cuda:
        raise SettingsError(
            f"{why} on the GPU needs a DALI built for torch's CUDA version. The installed torch {torch.__version__} is "
            f"for CUDA {torch.version.cuda}, but the installed DALI {version} is for CUDA {dali_cuda}. Change it:  "
            f"pip uninstall --yes nvidia-dali-cuda{dali_cuda}0  &&  {pip_line()}"
        )
    return dali


def pip_line(option: str = "") -> str:
    """Return the command that installs the right DALI for torch; without CUDA, either package works."""
    cuda = str(torch.version.cuda).partition(".")[0]
    package = "nvidia-dali-cuda120" if cuda.isdecimal() and int(cuda) < 13 else "'lightning-feed[dali]'"
    return " ".join(filter(None, ("pip install", option, package)))


def upsamples_like_libjpeg() -> bool:
    """Return True if the GPU decoder can interpolate the chroma of JPEGs as libjpeg does.

    With nvJPEG before 13.2, nvImageCodec cannot interpolate like libjpeg while decoding only a region: it writes a
    warning for every image, and leaves the image to another decoder.
    """
    version = nvjpeg_version()
    return version is not None and version >= (13, 2)


def nvjpeg_version() -> tuple[int, int] | None:
    """Return the version (major, minor) of the nvJPEG library that DALI decodes with. Returns None if unknown.

    DALI opens nvJPEG by the file name used in this function, and so gets the library of that name that the process has
    loaded already: usually torchvision's copy, whatever the version of the package ``nvidia-nvjpeg`` (seen with DALI
    2.4.0 and torchvision 0.29.1, which brings nvJPEG 13.0).
    """
    cuda = str(torch.version.cuda).partition(".")[0]
    major = ctypes.c_int()
    minor = ctypes.c_int()
    try:
        library = ctypes.CDLL(f"libnvjpeg.so.{cuda}")
        # 0 and 1 are MAJOR_VERSION and MINOR_VERSION of CUDA's libraryPropertyType.
        failed = library.nvjpegGetProperty(0, ctypes.byref(major)) or library.nvjpegGetProperty(1, ctypes.byref(minor))
    except (OSError, AttributeError):  # no such library, or no such function in it
        return None
    if failed:
        return None
    return (major.value, minor.value)


def take_output(pipeline: Any, device: torch.device) -> Tensor:
    """Wait for a pipeline's oldest scheduled run, and return its first output as a tensor.

    Args:
        pipeline: a pipeline with the dynamic executor, whose outputs own their memory, and with a scheduled run
            (``schedule_run``). All output samples must have one shape.
        device: device of the pipeline. An output on a CUDA device is ordered after the current stream there, and must
            be used on that stream; the host does not wait.

    Raises:
        RuntimeError: the error of an operator.
    """
    stream = () if device.type == "cpu" else (torch.get_device_module(device).current_stream(device),)
    outputs = pipeline.share_outputs(*stream)
    try:
        return from_dlpack(outputs[0].as_tensor())
    finally:
        pipeline.release_outputs()


def reason_of(error: Exception) -> str:
    """Return the cause from DALI's message, without its place in the pipeline definition."""
    cause = str(error).split("encountered:")[-1].replace("Current pipeline object is no longer valid.", "")
    return " ".join(cause.split()) or type(error).__name__


def raise_if_no_memory(error: Exception, device: torch.device) -> None:
    """Raise a clear error if DALI ran out of memory. No image is at fault then, and a retry does not help.

    Raises:
        torch.OutOfMemoryError: on a CUDA device, with torch's wording, which batch size finders check for.
        LoaderError: on the CPU.
    """
    if any(text in str(error).lower() for text in _NO_MEMORY):
        advice = "Use a smaller batch_size, DaliOptions(prefetch=1) or fewer DaliOptions(threads=...)."
        if device.type != "cpu":
            raise torch.OutOfMemoryError(f"CUDA out of memory in DALI: {reason_of(error)} {advice}") from error
        raise LoaderError(f"DALI does not have enough memory. It said: {reason_of(error)} {advice}") from error


def release_unused_memory() -> None:
    """Free the memory of closed pipelines in DALI's pools, which torch cannot use."""
    require_dali(gpu=False).backend.ReleaseUnusedMemory()


pipelines: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Pipelines of this process. A forked child, such as a DataLoader worker, must not free them: it lacks their threads,
and freeing a pipeline would wait for these threads forever (DALI 2.4: ``~Executor2`` destroys a condition variable that
has waiters). So each child keeps references to the pipelines in ``_kept``."""
_kept: list[object] = []
os.register_at_fork(after_in_child=lambda: _kept.extend(pipelines))
