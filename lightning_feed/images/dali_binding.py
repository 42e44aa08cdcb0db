"""NVIDIA DALI as this package uses it: options, the import, outputs as tensors, failures, and forked processes."""

import importlib
import os
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lightning_feed.errors import LoaderError, MissingExtraError, SettingsError
from lightning_feed.load.machine import Machine

_GPU_THREADS = 8
"""With ``device_memory_padding`` and ``host_memory_padding`` each thread has buffers for the largest image, one on the
device and two page-locked ones (DALI's documentation of ``fn.decoders.image``): 66 and 89 MB for 12 megapixels."""


@dataclass(frozen=True, kw_only=True)
class DaliOptions:
    """Options of ``backend="dali-cpu"`` and ``"dali-gpu"``.

    Raises:
        SettingsError: for a value that is impossible.
    """

    threads: int | Literal["auto"] = "auto"
    """CPU threads of each pipeline. ``"auto"``: one less than the CPUs of this rank; for ``"dali-gpu"`` at most 8,
    since each has buffers of its own for the largest image."""
    prefetch: int = 2
    """Batches that are decoded ahead. Each costs the memory of one batch. With ``num_workers=0`` they are also read
    ahead in the training process, and draw their crop boxes from its random numbers earlier than without DALI."""
    keep_eval_pipelines: bool = False
    """True keeps the pipelines of validation, test and prediction from pass to pass. The next pass then begins
    sooner, and they hold memory, on the GPU too, while training goes on."""
    largest_image: tuple[int, int] | None = None
    """(height, width) in pixels of the largest image, for ``"dali-gpu"``: the decoder's buffers are made once, large
    enough for it. None: of the largest among some images. A larger one is decoded too, and makes them grow."""
    hw_decoder_load: float | None = None
    """Share of the JPEGs for the GPU's hardware decoder, 0 to 1, for ``"dali-gpu"``. None: DALI's own default."""

    def __post_init__(self) -> None:
        if self.threads != "auto":
            _check_whole("threads", self.threads)
        _check_whole("prefetch", self.prefetch)
        if self.largest_image is not None and not _is_size(self.largest_image):
            raise SettingsError(
                f"DaliOptions(largest_image={self.largest_image!r}): give (height, width) in pixels, as (1200, 1600)."
            )
        if self.hw_decoder_load is not None and not 0 <= self.hw_decoder_load <= 1:
            raise SettingsError(f"DaliOptions(hw_decoder_load={self.hw_decoder_load!r}): give a share from 0 to 1.")


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"DaliOptions({name}={value!r}) is not possible. Give a whole number, 1 or more.")


def _is_size(sides: tuple[int, ...]) -> bool:
    return len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)


def decode_threads(
    options: DaliOptions, machine: Machine, local_ranks: int = 1, *, gpu: bool = False
) -> tuple[int, str]:
    """CPU threads for a pipeline, and why so many.

    Args:
        options: what was asked for.
        machine: the limits of this process.
        local_ranks: training processes that share them.
        gpu: whether a GPU decodes.
    """
    if options.threads != "auto":
        return options.threads, "as asked for"
    share = machine.usable_cpus // max(1, local_ranks)
    reason = f"{machine.usable_cpus} {machine.cpu_reason}"
    if local_ranks > 1:
        reason += f", divided among {local_ranks} ranks"
    if gpu and share - 1 > _GPU_THREADS:
        return _GPU_THREADS, f"{reason}, and no more than {_GPU_THREADS} beside a GPU"
    return max(1, share - 1), f"{reason}, one left to train"


FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""Errors of DALI for an operator that failed, by the kind of failure (read in 2.4.0)."""

_NO_MEMORY = ("out of memory", "can't allocate", "bad_alloc", "allocation failed", "insufficient memory")
"""DALI's words for too little memory, in small letters (in the libraries of 2.4.0)."""
_OLDEST = 2  # first number of the version: what this was written for, and what the extra asks for


def require_dali(*, gpu: bool, why: str = "Decoding with DALI") -> Any:
    """Import ``nvidia.dali``, or say how to install the one that fits.

    Args:
        gpu: whether it is to work on the GPU: there it has to be of the CUDA that torch is of.
        why: what needs it, as the subject of a sentence.

    Raises:
        MissingExtraError: when it is not installed, or cannot be loaded.
        SettingsError: when it is older than 2.0, or, for the GPU, of another CUDA than torch.
    """
    try:
        dali = importlib.import_module("nvidia.dali")
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("nvidia", "nvidia.dali"):
            raise MissingExtraError(f"{why} needs NVIDIA DALI. Install it:  {pip_line()}") from error
        raise MissingExtraError(
            f"{why} needs NVIDIA DALI, which is installed and cannot be loaded: {type(error).__name__}: {error}. "
            f"Install it again:  {pip_line('--force-reinstall')}"
        ) from error
    version = str(getattr(dali, "__version__", "of unknown version"))
    first = version.split(".")[0]
    if not first.isdecimal() or int(first) < _OLDEST:
        raise SettingsError(
            f"{why} needs NVIDIA DALI {_OLDEST}.0 or newer, and DALI {version} is installed. Upgrade it:  "
            f"{pip_line('--upgrade')}"
        )
    # DALI keeps "12.9.86" as the number 12986 (read in 2.4.0), of which its own checks take the first two digits.
    theirs, ours = str(getattr(dali, "__cuda_version__", ""))[:2], str(torch.version.cuda).partition(".")[0]
    if gpu and ours.isdecimal() and theirs.isdecimal() and ours != theirs:
        raise SettingsError(
            f"{why} on the GPU needs a DALI of torch's CUDA. The installed torch {torch.__version__} is of CUDA "
            f"{torch.version.cuda}, and the installed DALI {version} of CUDA {theirs}. Change it:  "
            f"pip uninstall --yes nvidia-dali-cuda{theirs}0  &&  {pip_line()}"
        )
    return dali


def pip_line(option: str = "") -> str:
    """The command that installs the DALI that fits the installed torch; either fits a torch without CUDA."""
    cuda = str(torch.version.cuda).partition(".")[0]
    package = "nvidia-dali-cuda120" if cuda.isdecimal() and int(cuda) < 13 else "'lightning-feed[dali]'"
    return " ".join(filter(None, ("pip install", option, package)))


def take_output(pipeline: Any, device: torch.device) -> Tensor:
    """Wait for the oldest scheduled run of a pipeline, and take its first output, whose samples have one shape.

    Args:
        pipeline: of the dynamic executor, whose outputs own their memory, with a run scheduled (``schedule_run``).
        device: that it works on. An output on a CUDA device is ordered after the current stream there, and has to be
            used on it; the host does not wait.

    Raises:
        RuntimeError: what an operator raised.
    """
    stream = (torch.cuda.current_stream(device),) if device.type == "cuda" else ()
    outputs = pipeline.share_outputs(*stream)
    try:
        return from_dlpack(outputs[0].as_tensor())
    finally:
        pipeline.release_outputs()


def reason_of(error: Exception) -> str:
    """The part of DALI's message that says what went wrong, without the place in the definition of the pipeline."""
    said = str(error).split("encountered:")[-1].replace("Current pipeline object is no longer valid.", "")
    return " ".join(said.split()) or type(error).__name__


def raise_if_no_memory(error: Exception, device: torch.device) -> None:
    """Say that memory is short, where that is the error: it is no image's fault, and no other try will do.

    Raises:
        torch.OutOfMemoryError: on a CUDA device, as torch says it: batch size finders look for this.
        LoaderError: on the CPU.
    """
    if any(text in str(error).lower() for text in _NO_MEMORY):
        advice = "Use a smaller batch_size, DaliOptions(prefetch=1) or fewer DaliOptions(threads=...)."
        if device.type == "cuda":
            raise torch.OutOfMemoryError(f"CUDA out of memory in DALI: {reason_of(error)} {advice}") from error
        raise LoaderError(f"DALI has not enough memory. It said: {reason_of(error)} {advice}") from error


def release_unused_memory() -> None:
    """Give back what DALI's memory pools keep of pipelines that are gone: it is out of torch's reach."""
    require_dali(gpu=False).backend.ReleaseUnusedMemory()


pipelines: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Those of this process. Children that are forked, as workers of a DataLoader are, must not free them: their threads
are not there, and freeing one waits for them for ever (DALI 2.4: ``~Executor2`` destroys a condition variable that has
waiters). Garbage that the parent had not collected yet is collected in the child."""
_kept: list[object] = []
os.register_at_fork(after_in_child=lambda: _kept.extend(pipelines))
