"""``backend="auto"`` as a table: what was measured, what is installed, what is taken and why."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_feed.data import image_backends
from lightning_feed.data.backend_measurements import BackendMeasurement
from lightning_feed.data.image_backends import (
    HEADROOM_PCT,
    NOT_MEASURED,
    BackendFacts,
    check_backend,
    choose_backend,
)
from lightning_feed.errors import SettingsError
from lightning_feed.load.dali.binding import DaliOptions

BOUND = BackendMeasurement(
    backend="torch",
    by="diagnose",
    day="2026-11-21",
    batch_size=64,
    cpu_bound=True,
    starved_pct=60.0,
    samples_per_s=1000.0,
    loader_samples_per_s=1010.0,
    model_samples_per_s=2500.0,
    movable_pct=90.0,
    num_workers=8,
    usable_cpus=8,
)
TUNED = BackendMeasurement(
    backend="torch", by="tune", day="2026-11-20", batch_size=64, cpu_bound=True, starved_pct=60.0,
    loader_samples_per_s=1000.0, model_samples_per_s=2500.0,
)  # fmt: skip
MISSING = "DALI is not installed"


def _choose(
    *findings: BackendMeasurement, device: str = "cuda", no_dali: str = "", no_nvjpeg: str = "", **facts: Any
) -> tuple[str, str]:
    missing = {"nvjpeg": no_nvjpeg, "dali-gpu": no_dali, "dali-cpu": no_dali}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_backends, "why_missing", lambda backend, device: missing[backend])
        choice = choose_backend(BackendFacts(device=torch.device(device), findings=findings, **facts))
    return choice.name, choice.reason


def _ran(backend: str, rate: float, **changes: Any) -> BackendMeasurement:
    return replace(BOUND, backend=backend, samples_per_s=rate, cpu_bound=False, **changes)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_what_was_not_measured_is_not_guessed(device: str) -> None:
    assert _choose(device=device) == ("torch", NOT_MEASURED)
    assert "lightning-feed diagnose" in NOT_MEASURED


def test_decode_bound_with_headroom_takes_dali_where_it_is() -> None:
    name, reason = _choose(BOUND)
    assert name == "dali-gpu"
    assert "1,000 images/s" in reason
    assert "2,500" in reason
    assert "60 %" in reason
    assert "lightning-feed diagnose, 2026-11-21" in reason


def test_else_nvjpeg_and_it_says_why_not_dali() -> None:
    name, reason = _choose(BOUND, no_dali=MISSING)
    assert name == "nvjpeg"
    assert f'not "dali-gpu": {MISSING}' in reason


def test_with_neither_it_stays_and_says_what_is_missing() -> None:
    name, reason = _choose(BOUND, no_dali=MISSING, no_nvjpeg="this torchvision has none")
    assert name == "torch"
    assert MISSING in reason
    assert "this torchvision has none" in reason


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
@pytest.mark.parametrize("finding", [BOUND, TUNED])
def test_without_a_gpu_never_a_gpu_backend(device: str, finding: BackendMeasurement) -> None:
    name, reason = _choose(finding, device=device)
    assert name == "torch"
    assert f"training is on {device}, and no GPU could decode" in reason
    assert _choose(finding, _ran("nvjpeg", 9000.0), _ran("dali-gpu", 9000.0), device=device)[0] == "torch"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu_bound": False}, "not the CPUs of the workers"),
        ({"starved_pct": HEADROOM_PCT - 0.5}, "the GPU has only 20 % of its time"),
        ({"starved_pct": 3.0}, "only 3 %"),
        ({"num_workers": 4}, "4 workers on 8 CPUs, so more workers come first"),
        ({"num_workers": 0}, "0 workers on 8 CPUs"),
        ({"movable_pct": 30.0}, "reading takes 70 %"),
    ],
)
def test_what_speaks_against_it(change: dict[str, Any], words: str) -> None:
    name, reason = _choose(replace(BOUND, **change))
    assert name == "torch"
    assert words in reason
    assert "1,000 images/s" in reason


@pytest.mark.parametrize(
    "change",
    [
        {"starved_pct": HEADROOM_PCT},
        {"num_workers": None},
        {"usable_cpus": None},
        {"num_workers": 16},
        {"movable_pct": None},
        {"movable_pct": 50.0},
        {"loader_samples_per_s": None, "model_samples_per_s": None},
    ],
)
def test_what_does_not_speak_against_it(change: dict[str, Any]) -> None:
    assert _choose(replace(BOUND, **change))[0] == "dali-gpu"


# The model alone takes 2,500 images/s (60 % of the time at 1,000 is waiting): in turns with decoding at D images/s that
# makes 1 / (1/D + 1/2500).
@pytest.mark.parametrize(
    ("device_rate", "name"),
    [(None, "nvjpeg"), (20_000.0, "nvjpeg"), (1_820.0, "nvjpeg"), (1_800.0, "torch"), (900.0, "torch")],
)
def test_a_gpu_that_was_seen_to_decode_slowly_is_left_alone(device_rate: float | None, name: str) -> None:
    finding = replace(BOUND, device_samples_per_s=device_rate)
    got, reason = _choose(finding, no_dali=MISSING)
    assert got == name
    if name == "torch":
        assert f"decodes {device_rate:,.0f} images/s" in reason
    # That is nvJPEG as torchvision calls it; nothing is known of DALI.
    assert _choose(finding)[0] == "dali-gpu"


# --- several were measured ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "name"),
    [
        ({"nvjpeg": 2000.0}, "nvjpeg"),
        ({"nvjpeg": 2000.0, "dali-gpu": 1500.0}, "nvjpeg"),
        ({"nvjpeg": 2000.0, "dali-gpu": 2300.0}, "dali-gpu"),
        ({"dali-cpu": 1100.0}, "dali-cpu"),
        ({"nvjpeg": 1040.0, "dali-gpu": 1049.0}, "torch"),
        ({"nvjpeg": 500.0}, "dali-gpu"),  # not measured, and what was measured of torch speaks for it
        ({"dali-gpu": 500.0}, "nvjpeg"),
    ],
)
def test_the_fastest_that_was_measured_is_taken(rates: dict[str, float], name: str) -> None:
    got, reason = _choose(BOUND, *(_ran(backend, rate) for backend, rate in rates.items()))
    assert got == name
    if name in rates:
        assert f"{rates[name]:,.0f} images/s" in reason
        assert "1,000 with torch" in reason


def test_what_was_measured_and_slower_is_said() -> None:
    name, reason = _choose(BOUND, _ran("nvjpeg", 500.0), no_dali=MISSING)
    assert name == "torch"
    assert '"nvjpeg": training took 500 images/s with it' in reason


def test_on_a_cpu_too_what_was_measured_faster_is_taken() -> None:
    assert _choose(BOUND, _ran("dali-cpu", 1200.0), device="cpu")[0] == "dali-cpu"
    assert _choose(BOUND, _ran("dali-cpu", 1040.0), device="cpu")[0] == "torch"
    assert _choose(BOUND, _ran("dali-cpu", 1200.0), device="cpu", no_dali=MISSING)[0] == "torch"


def test_what_is_no_longer_there_is_not_taken() -> None:
    assert _choose(BOUND, _ran("dali-gpu", 4000.0), no_dali=MISSING)[0] == "nvjpeg"
    assert _choose(BOUND, _ran("nvjpeg", 4000.0), no_nvjpeg="none")[0] == "dali-gpu"


def test_rates_of_another_batch_size_are_not_compared() -> None:
    not_bound = replace(BOUND, cpu_bound=False)
    assert _choose(not_bound, _ran("nvjpeg", 9000.0, batch_size=512))[0] == "torch"
    assert _choose(BOUND, _ran("nvjpeg", 500.0, batch_size=512), no_dali=MISSING)[0] == "nvjpeg"


def test_another_backend_alone_says_nothing() -> None:
    name, reason = _choose(_ran("nvjpeg", 9000.0))
    assert name == "torch"
    assert "only 'nvjpeg' was measured" in reason


# --- tune ---------------------------------------------------------------------------------------------------------


def test_tuning_alone_will_do() -> None:
    name, reason = _choose(TUNED)
    assert name == "dali-gpu"
    assert "the loader alone gives 1,000 images/s" in reason
    assert "lightning-feed tune, 2026-11-20" in reason


def test_diagnose_goes_before_tune() -> None:
    fed = replace(BOUND, cpu_bound=False, starved_pct=1.0)
    assert _choose(TUNED, fed)[0] == _choose(fed, TUNED)[0] == "torch"


def test_training_with_another_backend_is_held_against_the_loader_of_torch() -> None:
    assert _choose(replace(TUNED, cpu_bound=False), _ran("nvjpeg", 1100.0))[0] == "nvjpeg"
    assert _choose(replace(TUNED, cpu_bound=False), _ran("nvjpeg", 1040.0))[0] == "torch"


# --- what only torch does -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"only_torch": ("transform", "cache")}, "a transform was given"),
        ({"only_torch": ("collate",)}, "collate was overridden"),
        ({"only_torch": ("drop_keys",)}, "drop_keys leaves parts"),
        ({"only_torch": ("cache",)}, "the cache keeps decoded images"),
        ({"only_torch": ("pixels",)}, "holds pixels"),
    ],
)
def test_what_only_torch_does_goes_first(facts: dict[str, Any], words: str) -> None:
    name, reason = _choose(BOUND, _ran("nvjpeg", 9000.0), **facts)
    assert name == "torch"
    assert words in reason


@pytest.mark.parametrize("quality", ["near", "fast"])
def test_dali_is_not_taken_where_the_quality_would_have_no_effect(quality: str) -> None:
    name, reason = _choose(BOUND, quality=quality)
    assert name == "nvjpeg"
    assert f"quality={quality!r} would have no effect" in reason
    assert _choose(BOUND, _ran("dali-gpu", 9000.0), quality=quality)[0] == "nvjpeg"
    assert _choose(BOUND, _ran("dali-cpu", 9000.0), quality=quality, device="cpu")[0] == "torch"


# --- options of DALI --------------------------------------------------------------------------------------------------


def _checked(backend: str, dali: DaliOptions | None, quality: str = "exact") -> DaliOptions:
    return check_backend(backend, quality, dali)


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(SettingsError, match="would have no effect with backend='torch'"):
        _checked("torch", DaliOptions())
    with pytest.raises(SettingsError, match=r"largest_image=\(10, 20\)\) is for decoding on the GPU"):
        _checked("dali-cpu", DaliOptions(largest_image=(10, 20)))
    with pytest.raises(SettingsError, match=r"hw_decoder_load=0.0\) is for decoding on the GPU"):
        _checked("dali-cpu", DaliOptions(hw_decoder_load=0.0))
    with pytest.raises(SettingsError, match="quality='near' would have no effect with backend='dali-gpu'"):
        _checked("dali-gpu", None, "near")


def test_what_has_an_effect_is_taken() -> None:
    given = DaliOptions(largest_image=(10, 20), hw_decoder_load=0.5)
    assert _checked("dali-gpu", given) is given
    assert _checked("auto", given, "near") is given
    assert _checked("torch", None, "fast") == DaliOptions()
