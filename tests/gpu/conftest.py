"""Each test on a GPU runs as if it were the first."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_memory_of_earlier_tests() -> None:
    """What earlier tests left would be collected, or serve in place of new memory, in the middle of this one."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
