"""Is DALI there, new enough, and of the CUDA that the installed torch is of?"""

import importlib
from typing import Any

import torch

from lightning_feed.errors import MissingExtraError, SettingsError

_OLDEST = 2  # of its first number: what this was written for, and the first that is asked for by the extra
_LINES = {13: "pip install 'lightning-feed[dali]'", 12: "pip install nvidia-dali-cuda120"}
"""By the first number of torch's CUDA."""


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
    except ModuleNotFoundError as error:
        if error.name not in ("nvidia", "nvidia.dali"):
            raise _broken(why, error) from error
        raise MissingExtraError(f"{why} needs NVIDIA DALI. Install it:  {pip_line()}") from error
    except (ImportError, OSError) as error:
        raise _broken(why, error) from error
    version = str(getattr(dali, "__version__", "of unknown version"))
    first = version.split(".")[0]
    if not first.isdecimal() or int(first) < _OLDEST:
        raise SettingsError(
            f"{why} needs NVIDIA DALI {_OLDEST}.0 or newer, and DALI {version} is installed. Upgrade it:  "
            f"{pip_line('--upgrade')}"
        )
    ours, theirs = _torch_cuda(), _dali_cuda(dali)
    if gpu and ours is not None and theirs is not None and ours != theirs:
        raise SettingsError(
            f"{why} on the GPU needs a DALI of torch's CUDA. The installed torch {torch.__version__} is of CUDA "
            f"{torch.version.cuda}, and the installed DALI {version} of CUDA {theirs}. Change it:  "
            f"pip uninstall --yes nvidia-dali-cuda{theirs}0  &&  {pip_line()}"
        )
    return dali


def pip_line(option: str = "") -> str:
    """The command that installs the DALI that fits the installed torch; either fits a torch without CUDA."""
    ours = _torch_cuda()
    line = _LINES[12 if ours is not None and ours < 13 else 13]
    return line.replace("install", f"install {option}", 1) if option else line


def _torch_cuda() -> int | None:
    return None if torch.version.cuda is None else int(torch.version.cuda.split(".")[0])


def _dali_cuda(dali: Any) -> int | None:
    # DALI keeps "12.9.86" as the number 12986 (read in 2.4.0), of which its own checks take the first two digits.
    digits = str(getattr(dali, "__cuda_version__", ""))[:2]
    return int(digits) if digits.isdecimal() else None


def _broken(why: str, error: Exception) -> MissingExtraError:
    return MissingExtraError(
        f"{why} needs NVIDIA DALI, which is installed and cannot be loaded: {type(error).__name__}: {error}. "
        f"Install it again:  {pip_line('--force-reinstall')}"
    )
