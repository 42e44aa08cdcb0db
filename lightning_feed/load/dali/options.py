"""DaliOptions, and the number of threads of a pipeline."""

from dataclasses import dataclass
from typing import Literal

from lightning_feed.errors import SettingsError
from lightning_feed.load.machine import Machine

_GPU_THREADS = 8
"""With ``device_memory_padding`` and ``host_memory_padding`` each thread has buffers for the largest image, one on the
device and two page-locked ones (DALI's documentation of ``fn.decoders.image``): 66 and 89 MB for 12 megapixels."""


@dataclass(frozen=True, kw_only=True)
class DaliOptions:
    """How ``backend="dali-cpu"`` and ``"dali-gpu"`` decode.

    Raises:
        SettingsError: for a value that is impossible.
    """

    threads: int | Literal["auto"] = "auto"
    """CPU threads of each pipeline. ``"auto"``: this rank's share of the CPUs, but for one that trains; for
    ``"dali-gpu"`` at most 8, since each has buffers of its own for the largest image."""
    prefetch: int = 2
    """Batches that are decoded ahead. Each costs the memory of one batch. With ``num_workers=0`` they are also read
    ahead in the training process, whose random numbers their boxes are then drawn from, earlier than without DALI."""
    keep_eval_pipelines: bool = False
    """Whether the pipelines of validation, test and prediction are kept when their pass ends. They hold memory, on
    the GPU too, while training goes on; kept, the next pass begins sooner."""
    largest_image: tuple[int, int] | None = None
    """(height, width) in pixels of the largest image, for ``"dali-gpu"``: the decoder's buffers are made once, large
    enough for it. None: of the largest among some images. A larger one is decoded too, and makes them grow."""
    hw_decoder_load: float | None = None
    """Share of the JPEGs for the GPU's hardware decoder, 0 to 1, for ``"dali-gpu"``. None: DALI's own default."""

    def __post_init__(self) -> None:
        for name, value in (("threads", self.threads), ("prefetch", self.prefetch)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and (name, value) != ("threads", "auto"):
                raise SettingsError(f"DaliOptions({name}={value!r}) is not possible. Give a whole number, 1 or more.")
        if self.largest_image is not None and (
            len(self.largest_image) != 2 or not all(isinstance(side, int) and side > 0 for side in self.largest_image)
        ):
            raise SettingsError(
                f"DaliOptions(largest_image={self.largest_image!r}): give (height, width) in pixels, as (1200, 1600)."
            )
        if self.hw_decoder_load is not None and not 0 <= self.hw_decoder_load <= 1:
            raise SettingsError(f"DaliOptions(hw_decoder_load={self.hw_decoder_load!r}): give a share from 0 to 1.")

    def refuse_gpu_options(self, why: str) -> None:
        """Refuse what is for the decoder of ``backend="dali-gpu"`` alone.

        Args:
            why: it has no effect, as the end of a sentence, and what to do.

        Raises:
            SettingsError: names the option.
        """
        for name in ("largest_image", "hw_decoder_load"):
            if getattr(self, name) is not None:
                raise SettingsError(f"DaliOptions({name}={getattr(self, name)!r}) {why}")


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
