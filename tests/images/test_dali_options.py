"""Options of the DALI backends: impossible ones are refused, and so are those without effect."""

from typing import Any

import pytest

from lightning_feed.errors import SettingsError
from lightning_feed.images.dali_binding import DaliOptions, decode_threads
from lightning_feed.machine.limits import Machine


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", "many"),
        ("threads", True),
        ("prefetch", 0),
        ("prefetch", 1.5),
        ("largest_image", (0, 10)),
        ("largest_image", (10,)),
        ("largest_image", (10.0, 10)),
        ("hw_decoder_load", -0.1),
        ("hw_decoder_load", 1.1),
    ],
)
def test_impossible_dali_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"DaliOptions\\({name}="):
        DaliOptions(**{name: value})


def machine(cpus: int) -> Machine:
    return Machine(
        usable_cpus=cpus,
        cpu_reason="CPUs of the machine",
        available_memory_bytes=None,
        free_shm_bytes=None,
        start_method="fork",
    )


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (16, 1, 15), (16, 4, 3), (4, 8, 1)])
def test_decode_threads_are_the_share_of_cpus_of_a_rank_minus_one(cpus: int, ranks: int, threads: int) -> None:
    found, reason = decode_threads(DaliOptions(), machine(cpus), ranks)
    assert found == threads
    assert f"{cpus} CPUs of the machine" in reason
    assert ("divided among" in reason) == (ranks > 1)


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(2, 1, 1), (8, 1, 7), (64, 1, 8), (64, 8, 7), (128, 4, 8)])
def test_decode_threads_are_at_most_eight_beside_a_gpu(cpus: int, ranks: int, threads: int) -> None:
    """Each has buffers of its own for the largest image, on the device too."""
    found, reason = decode_threads(DaliOptions(device="gpu"), machine(cpus), ranks)
    assert found == threads
    assert ("beside a GPU" in reason) == (cpus // ranks > 9)


def test_requested_decode_threads_are_used_as_given() -> None:
    assert decode_threads(DaliOptions(threads=7), machine(2), 2) == (7, "as requested")
    assert decode_threads(DaliOptions(device="gpu", threads=70), machine(2), 2) == (70, "as requested")
