"""Every remedy that can be printed: a run in which it is, runs in which it must not be, its bound, what is
pasted."""

import ast
import shlex
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import lightning.pytorch.callbacks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from verdict.cases import ASLEEP, BUSY, READY, kinds, measured, under

import lightning_feed
from lightning_feed import cli
from lightning_feed.measure.experiment_results import CropTrial, LighterSample, PackedImages, ThreadsTrial, TriedSetting
from lightning_feed.measure.measurements import OTHERS_PCT, HookCode, HookTime, LoaderCode
from lightning_feed.measure.wall import WallPart, WallStats
from lightning_feed.report.next_step import next_step
from lightning_feed.report.report import RunIdentity
from lightning_feed.report.words import words
from lightning_feed.verdict.decide import decide, rarer_checkpoints, rarer_validation
from lightning_feed.verdict.diagnosis import Form, Note, Remedy
from lightning_feed.verdict.remedies import RULES, may_try_workers, setting_of
from lightning_feed.verdict.thresholds import (
    HEAD_OF_LINE_PCT,
    LEAST_GAIN_PCT,
    LEAST_UNSURE_GAIN_PCT,
    MOST_REMEDIES,
)


def tried(own: tuple[int, float], *others: tuple[int, float], spread: float = 0.01) -> tuple[TriedSetting, ...]:
    """Trials of numbers of workers, as (number, step time); the fastest is chosen if it is 3 % faster than the own."""
    fastest = min((own, *others), key=lambda setting: setting[1])
    if fastest[1] > 0.97 * own[1]:
        fastest = own
    return tuple(
        TriedSetting(
            num_workers=number,
            prefetch_factor=2,
            step_ms=step_ms,
            shortest_ms=step_ms * (1 - spread / 2),
            longest_ms=step_ms * (1 + spread / 2),
            own=(number, step_ms) == own,
            chosen=(number, step_ms) == fastest,
        )
        for number, step_ms in sorted((own, *others))
    )


FASTER = tried((2, 100.0), (4, 60.0))
"""Four workers were tried, and are faster than the run's two."""
CUDA: dict[str, Any] = {"device_type": "cuda", "pin_memory": True}
IMAGES: dict[str, Any] = {
    "decoder": "turbo",
    "staged": False,
    "own_transforms": False,
    "backend": "torch",
    "ours": True,
}
BY_TORCH: dict[str, Any] = {"workers": "process", "in_place": False, "may_use_slots": True}
"""Worker processes hand batches over as torch does, but need not."""
COLD = ASLEEP | {"page_cache_pct": 10.0, "disk_mb_per_s": 30.0}
STARTS: dict[str, Any] = {"batches_per_epoch": 5, "persistent_workers": False, "may_persist": True}
SLOW_START: dict[str, Any] = {"data": 0.0, "stats": {"epoch_start_s": 0.7}}
CROPS = CropTrial(folder="birds", val_fraction=0.1, whole_ms=4.0, crop_ms=2.0)
PACK = PackedImages(
    root="birds",
    path="birds-256.pixels",
    short_side_px=256,
    decoded=True,
    folder_bytes=2**20,
    pack_bytes=3 * 2**20,
)
DECODER = LighterSample(setting="decoder", value="turbo-region", now_ms=4.0, then_ms=2.0)
NVJPEG = LighterSample(setting="backend", value="nvjpeg", now_ms=4.0, then_ms=0.4, device_ms=5.0)
FAST = LighterSample(setting="quality", value="fast", now_ms=4.0, then_ms=3.2)
PACKED = LighterSample(setting="root", value=PACK.path, now_ms=4.0, then_ms=1.0, pack=PACK)
DECODING: dict[str, Any] = {
    "loaders": BUSY,
    "num_workers": 15,
    "usable_cpus": 16,
    "batch_size": 8,
    "backend": "torch",
    "quality": "exact",
    "decoder": "pillow",
    "ours": True,
}
"""Fifteen workers on sixteen CPUs decode the images of an ImageFolderDataModule."""
NOT_DECODING: dict[str, Any] = {
    "nothing waits for decoding": {"data": 0.0},
    "reads take the time": {"loaders": ASLEEP},
    "it was not tried": {"experiments": {}},
    "validation": {"stage": "validate"},
}
WHOLE: dict[str, Any] = {"loaders": BUSY, "usable_cpus": 2, "cpu_ms": 0.0, "batch_size": 8}
BAR = (HookTime(name="[Callback]TQDMProgressBar.on_train_batch_end", ms_per_step=20.0),)
SLOW = "[Callback]Slow.on_train_batch_end"
THEIRS: dict[str, Any] = {
    "hooks": (HookTime(name="[Callback]Slow{'a': 1}.on_train_batch_end", ms_per_step=20.0),),
    "hook_code": (HookCode(name=SLOW, at="train.py:12", interval="every_n_steps"),),
}
LOG = (HookTime(name="logger CSVLogger.log_metrics", ms_per_step=20.0),)


class Slow(lightning.pytorch.callbacks.Callback):
    """A user's."""

    def __init__(self, every_n_steps: int = 1) -> None:
        self.every_n_steps = every_n_steps


def _wall(**seconds: Any) -> WallStats:
    """Seconds, or seconds and times, of each part."""
    parts = {name: given if isinstance(given, tuple) else (given, 1) for name, given in seconds.items()}
    return WallStats(
        wall_s=sum(spent for spent, _ in parts.values()),
        parts=tuple(WallPart(name=name, seconds=spent, times=times) for name, (spent, times) in parts.items()),  # type: ignore[arg-type]
    )


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One rule: the run in which its remedy is the first, what that is, and what else takes it away."""

    run: dict[str, Any]
    changes: str
    code: str
    step_ms: float | None
    without: dict[str, dict[str, Any]] = field(default_factory=dict)
    """A name of what is different -> what is given to ``measured`` besides, or in its place."""


CONTRACTS = {
    "more workers": Contract(
        run={"loaders": BUSY, "experiments": {"tried": FASTER}},
        changes="num_workers=4",
        code="num_workers=4",
        step_ms=None,
        without={
            "no number was tried": {"experiments": {}},
            "nothing was tried": {"experiments": None},
            "training is fed": {"data": 1.0},
            "a stream that was not seen to divide itself": {"map_style": False},
            "a fork breaks the dataset": {"why_no_workers": "dataset.pool belongs to this process"},
            "threads": {"workers": "thread"},
            "two loaders with unlike numbers": {"every_num_workers": (2, 3)},
            "they gained nothing": {"experiments": {"tried": tried((2, 100.0), (4, 99.0))}},
            "batches are ready": {"loaders": READY},
            "steps of a first try": {"step": 1.0, "data": 0.4},
        },
    ),
    "fewer workers": Contract(
        run={"loaders": READY, "experiments": {"tried": tried((2, 100.0), (0, 70.0))}},
        changes="num_workers=0",
        code="num_workers=0, prefetch_factor=None",
        step_ms=None,
        without={
            "it was not tried": {"experiments": {}},
            "loading takes longer": {"experiments": {"tried": tried((2, 100.0), (0, 120.0))}},
        },
    ),
    "fewer torch threads": Contract(
        run={
            "loaders": BUSY,
            "torch_threads": 8,
            "every_num_workers": (2,),
            "experiments": {"threads": ThreadsTrial(torch_threads=6, num_workers=2, step_ms=60.0, own_ms=100.0)},
        },
        changes="torch_threads=6",
        code="torch.set_num_threads(6)",
        step_ms=None,
        without={
            "not tried": {"experiments": {}},
            "no faster": {
                "experiments": {"threads": ThreadsTrial(torch_threads=6, num_workers=2, step_ms=101.0, own_ms=100.0)}
            },
        },
    ),
    "persistent workers": Contract(
        run={**SLOW_START, **STARTS},
        changes="persistent_workers=True",
        code="persistent_workers=True",
        step_ms=None,
        without={
            "they live on already": {"persistent_workers": True},
            "the dataset is told the epoch": {"may_persist": False},
            "nobody saw whether it is": {"may_persist": None},
            "there is one epoch": {"max_epochs": 1},
            "epochs are long": {"batches_per_epoch": 5000},
            "the start is that of a batch": {"stats": {"epoch_start_s": 0.21}},
            "no workers": {"num_workers": 0},
            "a library makes the loader": {"loader_code": LoaderCode(words="made by timm", form="callback")},
        },
    ),
    "any order": Contract(
        run={"loaders": ASLEEP | {"head_of_line_pct": 50.0}},
        changes="in_order=False",
        code="in_order=False",
        step_ms=60.0,
        without={
            "any order already": {"in_order": False},
            "results are told apart by it": {"stage": "predict"},
            "one worker": {"num_workers": 1},
            "workers are never idle": {"loaders": BUSY | {"head_of_line_pct": 50.0}},
            "little is lost to the order": {"loaders": ASLEEP | {"head_of_line_pct": under(HEAD_OF_LINE_PCT)}},
        },
    ),
    "files in memory": Contract(
        run={"loaders": COLD, "usable_cpus": 2, "prefetch_factor": None, **IMAGES},
        changes="staged=True",
        code='stage_to="/dev/shm"',
        step_ms=60.0,
        without={
            "another data module": {"decoder": None},
            "it has a copy": {"staged": True},
            "files are in memory": {"loaders": ASLEEP | {"page_cache_pct": 99.0}},
            "it was tried": {"experiments": {"loader_per_s": 20.0, "cached_bytes_per_s": 20.5}},
        },
    ),
    "crops only": Contract(
        run=WHOLE | {"experiments": {"crops": CROPS}},
        changes="decodes_whole=False",
        code="from lightning_feed import ImageFolderDataModule, LoaderSettings\n"
        'ImageFolderDataModule("birds", 8, transform=..., val_fraction=0.1, loader=LoaderSettings(num_workers=2))',
        step_ms=60.0,
        without={
            "not timed": {"experiments": {}},
            "no faster": {"experiments": {"crops": replace(CROPS, crop_ms=3.9)}},
            "nothing waits for decoding": {"data": 0.0},
            "reads take the time": {"loaders": ASLEEP},
            "a loop of the user's own": {"loop": "plain"},
            "validation": {"stage": "validate"},
        },
    ),
    "batches in place": Contract(
        run={"data": 0.0, "copy": 40.0, **CUDA, "pin_memory": False, **BY_TORCH},
        changes="hand_over=slots",
        code="AutotuneCallback()",
        step_ms=60.0,
        without={
            "in place already": {"may_use_slots": False, "in_place": True},
            "a loader that iterates in its own way": {"may_use_slots": False},
            "tried": {"tuned": True},
            "a stream, which is not tuned": {"map_style": False},
            "several loaders, which are not tuned": {"every_num_workers": (2, 2)},
            "a driver that does not lock slots": {"device_type": "xpu"},
            "a loop of the user's own": {"loop": "plain"},
            "validation": {"stage": "validate"},
            "small tensors, each a copy of its own": {"pin_memory": True, "tensors": 100, "size_bytes": 100_000},
            "hidden": {"copy": 2.0},
        },
    ),
    "faster decoder": Contract(
        run=DECODING | {"experiments": {"lighter": (DECODER,)}},
        changes="decoder=auto",
        code='decoder="auto"',
        step_ms=60.0,
        without=NOT_DECODING | {"no faster": {"experiments": {"lighter": (replace(DECODER, then_ms=3.9),)}}},
    ),
    "decoding on the gpu": Contract(
        run=DECODING | {"experiments": {"lighter": (NVJPEG,)}},
        changes="backend=nvjpeg",
        code='backend="nvjpeg"',
        step_ms=60.0,
        without=NOT_DECODING
        | {"the device takes as long": {"experiments": {"lighter": (replace(NVJPEG, device_ms=12.5),)}}},
    ),
    "fast resizing": Contract(
        run=DECODING | {"experiments": {"lighter": (FAST,)}},
        changes="quality=fast",
        code='quality="fast"',
        step_ms=80.0,
        without=NOT_DECODING | {"no faster": {"experiments": {"lighter": (replace(FAST, then_ms=3.9),)}}},
    ),
    "packed images": Contract(
        run=DECODING | {"experiments": {"lighter": (PACKED,)}},
        changes="root=birds-256.pixels",
        code="lightning-feed pack birds birds-256.pixels --decoded --size 256",
        step_ms=60.0,
        without=NOT_DECODING | {"no faster": {"experiments": {"lighter": (replace(PACKED, then_ms=3.9),)}}},
    ),
    "pinned memory": Contract(
        run={
            "data": 0.0,
            "copy": 40.0,
            **CUDA,
            "pin_memory": False,
        },
        changes="pin_memory=True",
        code="pin_memory=True",
        step_ms=60.0,
        without={
            "pinned already": {"pin_memory": True},
            "no GPU": {"device_type": "cpu"},
            "hidden": {"copy": 2.0},
            "batches can come in place": BY_TORCH,
        },
    ),
    "prefetch callback": Contract(
        run={"data": 0.0, "copy": 40.0, **CUDA},
        changes="prefetch_callback=True",
        code="PrefetchCallback()",
        step_ms=60.0,
        without={
            "at work": {"stats": {"prefetch_active": True}},
            "pageable memory": {"pin_memory": False},
            "no GPU": {"device_type": "cpu"},
        },
    ),
    "rare progress bar": Contract(
        run={"data": 0.0, "other": 25.0, "hooks": BAR, "bar_refresh_rate": 1},
        changes="bar_refresh_rate=50",
        code="TQDMProgressBar(refresh_rate=50)",
        step_ms=80.4,
        without={
            "rare already": {"bar_refresh_rate": 50},
            "nobody knows how often": {"bar_refresh_rate": None},
            "another callback": {"hooks": (HookTime(name="[Callback]Mine.on_train_batch_end", ms_per_step=20.0),)},
            "it takes no time": {"hooks": (HookTime(name=BAR[0].name, ms_per_step=1.0),)},
        },
    ),
    "log rarely": Contract(
        run={"data": 0.0, "other": 25.0, "hooks": LOG, "log_every_n_steps": 1},
        changes="log_every_n_steps=50",
        code="log_every_n_steps=50",
        step_ms=80.4,
        without={
            "rare already": {"log_every_n_steps": 50},
            "no logger takes the time": {"hooks": BAR},
        },
    ),
    "rarer validation": Contract(
        run={"data": 0.0, "wall": _wall(train=10.0, validation=(30.0, 20)), "check_val_every_n_epoch": 1},
        changes="check_val_every_n_epoch=10",
        code="check_val_every_n_epoch=10",
        step_ms=None,
        without={
            "training takes more": {"wall": _wall(train=31.0, validation=(30.0, 20))},
            "there was one": {"wall": _wall(train=10.0, validation=(30.0, 1))},
            "it goes by time": {"check_val_every_n_epoch": None},
            "checkpoints take more": {"wall": _wall(train=10.0, validation=(30.0, 20), checkpoints=(40.0, 20))},
            "it is no fit": {"stage": "validate"},
        },
    ),
    "rarer checkpoints": Contract(
        run={"data": 0.0, "wall": _wall(train=10.0, checkpoints=(20.0, 40)), "checkpoint_steps": 5},
        changes="every_n_train_steps=40",
        code="ModelCheckpoint(every_n_train_steps=40)",
        step_ms=None,
        without={
            "training takes more": {"wall": _wall(train=21.0, checkpoints=(20.0, 40))},
            "they do not go by steps": {"checkpoint_steps": None},
            "validation takes more": {"wall": _wall(train=10.0, checkpoints=(20.0, 40), validation=(30.0, 20))},
        },
    ),
}


def test_every_remedy_rule_has_its_test_case() -> None:
    rules = [*RULES, rarer_validation, rarer_checkpoints]
    assert list(CONTRACTS) == [rule.__name__.replace("_", " ") for rule in rules]


def _changes(run: dict[str, Any]) -> list[str]:
    return [str(remedy.change) for remedy in decide(measured(**run)).remedies]


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_remedy_is_given_when_its_conditions_hold(name: str) -> None:
    contract = CONTRACTS[name]
    diagnosis = decide(measured(**contract.run))
    remedy = next(remedy for remedy in diagnosis.remedies if str(remedy.change) == contract.changes)
    assert remedy.code == contract.code
    assert remedy.least_step_ms == (contract.step_ms if contract.step_ms is None else pytest.approx(contract.step_ms))
    assert remedy.most_gain_pct is not None
    assert LEAST_GAIN_PCT <= remedy.most_gain_pct <= 100
    assert remedy.form in get_args(Form)
    assert remedy.why
    assert remedy.where
    assert "\n" not in remedy.where + "".join(words(note, diagnosis.measurements) for note in remedy.why)
    assert remedy.code.count("\n") == (remedy.form == "replacement")  # its import
    assert not any(f"={value}" in remedy.where for value in ("None", "..."))


@pytest.mark.parametrize(
    ("name", "different"), [(name, condition) for name, each in CONTRACTS.items() for condition in each.without]
)
def test_each_remedy_is_not_given_when_one_condition_fails(name: str, different: str) -> None:
    contract = CONTRACTS[name]
    then = _changes(contract.run | contract.without[different])
    if name == "more workers":
        assert not [
            change for change in then if change.startswith("num_workers=") and int(change.partition("=")[2]) > 2
        ]
    assert contract.changes not in then


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:'pin_memory' argument is set"
)  # few CPUs here
@pytest.mark.parametrize("name", CONTRACTS)
def test_code_of_each_remedy_can_be_pasted(name: str) -> None:
    (remedy,) = [
        remedy
        for remedy in decide(measured(**CONTRACTS[name].run)).remedies
        if str(remedy.change) == CONTRACTS[name].changes
    ]
    _paste(remedy)


def _paste(remedy: Remedy) -> None:
    if remedy.form == "arguments":
        DataLoader([1, 2, 3], **_keywords(remedy.code), **_needed(remedy))
    elif remedy.form == "datamodule":
        lightning_feed.ImageFolderDataModule("data", **_keywords(remedy.code))
    elif remedy.form == "replacement":
        ours = {name: getattr(lightning_feed, name) for name in ("ImageFolderDataModule", "LoaderSettings")}
        exec(remedy.code.replace("...", "str"), ours)
    elif remedy.form == "statement":
        threads = torch.get_num_threads()
        exec(remedy.code)
        torch.set_num_threads(threads)
    elif remedy.form == "command":
        command, *arguments = shlex.split(remedy.code)
        assert command == "lightning-feed"
        cli.make_parser().parse_args(arguments)
    elif remedy.form == "settings":
        lightning_feed.LoaderSettings(**_keywords(remedy.code))
    elif remedy.form == "trainer":
        Trainer(**_keywords(remedy.code), accelerator="cpu", logger=False, enable_checkpointing=False)
    elif remedy.form == "callback":
        name = remedy.code.partition("(")[0]
        known = globals().get(name) or getattr(lightning_feed, name, None) or getattr(lightning.pytorch.callbacks, name)
        assert isinstance(eval(remedy.code, {name: known}), lightning.pytorch.callbacks.Callback)
    else:
        raise AssertionError(remedy.form)


def _keywords(code: str) -> dict[str, Any]:

    tree = ast.parse(f"f({code})", mode="eval").body
    assert isinstance(tree, ast.Call)

    return {word.arg: ast.literal_eval(word.value) for word in tree.keywords if word.arg}


def _needed(remedy: Remedy) -> dict[str, Any]:
    """What the run has that torch wants beside it."""
    return {} if "num_workers" in remedy.code or "pin_memory" in remedy.code else {"num_workers": 2}


# --- the one place where it is decided ----------------------------------------------------------------------------


def test_remedies_are_sorted_by_gain_and_at_most_three() -> None:
    run = {
        "loaders": ASLEEP | {"head_of_line_pct": 30.0},
        "hooks": BAR,
        "bar_refresh_rate": 1,
        "other": 15.0,
        "copy": 10.0,
        **CUDA,
    }
    diagnosis = decide(measured(**run))
    gains = [remedy.most_gain_pct or 0.0 for remedy in diagnosis.remedies]
    assert [str(remedy.change) for remedy in diagnosis.remedies] == [
        "in_order=False",
        "bar_refresh_rate=50",
        "prefetch_callback=True",
    ]
    assert gains == sorted(gains, reverse=True)
    more = decide(measured(**run, log_every_n_steps=1))
    assert len(more.remedies) == MOST_REMEDIES


@pytest.mark.parametrize(
    ("low", "high", "confidence", "printed"),
    [(5.0, 13.0, "high", True), (1.0, 41.0, "high", False), (None, None, "low", False), (None, None, "high", True)],
)
def test_a_gain_within_noise_gives_no_remedy(low: Any, high: Any, confidence: str, printed: bool) -> None:
    late_ms = (LEAST_GAIN_PCT + LEAST_UNSURE_GAIN_PCT) / 2 + 1  # saved at most, of 100 ms
    stats = {"starved_low_pct": low, "starved_high_pct": high, "confidence": confidence}
    late = measured(loaders=ASLEEP | {"head_of_line_pct": HEAD_OF_LINE_PCT}, step=100, data=late_ms, stats=stats)
    assert bool(decide(late).remedies) is printed


def test_a_small_gain_gives_no_remedy_if_other_programs_use_the_cpus() -> None:
    late = {"loaders": ASLEEP | {"head_of_line_pct": HEAD_OF_LINE_PCT}, "data": 9.0}
    assert decide(measured(**late, others_cpu_pct=under(OTHERS_PCT))).remedies
    assert decide(measured(**late, others_cpu_pct=OTHERS_PCT)).remedies == ()


def test_trials_with_a_wide_spread_give_no_remedy() -> None:
    noisy = tried((2, 100.0), (4, 85.0), spread=0.4)
    assert decide(measured(experiments={"tried": noisy}, loaders=BUSY)).remedies == ()
    calm = tried((2, 100.0), (4, 85.0), spread=0.02)
    (remedy,) = decide(measured(experiments={"tried": calm}, loaders=BUSY)).remedies
    assert (str(remedy.change), remedy.tried_ms) == ("num_workers=4", (100.0, 85.0))
    assert remedy.most_gain_pct == pytest.approx(15.0)


# --- where it is pasted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader_code", "form", "code", "where"),
    [
        (None, "arguments", "num_workers=4", "num_workers: 2 -> 4 in your training DataLoader"),
        (
            LoaderCode(words='your training DataLoader (Data.train_dataloader, data.py:41, loader "cls")'),
            "arguments",
            "num_workers=4",
            'num_workers: 2 -> 4 in your training DataLoader (Data.train_dataloader, data.py:41, loader "cls")',
        ),
        (
            LoaderCode(words="loader=LoaderSettings(...) of Birds", form="settings"),
            "settings",
            "num_workers=4",
            "num_workers: 2 -> 4 in loader=LoaderSettings(...) of Birds",
        ),
        (
            LoaderCode(words="your training DataLoader (made by timm)", form="callback"),
            "callback",
            "AutotuneCallback()",
            "num_workers: 2 -> 4 by AutotuneCallback in callbacks=[...] of the Trainer, or by LIGHTNING_FEED=tune, in "
            "your training DataLoader (made by timm)",
        ),
        (
            LoaderCode(words="x", overrides=(("num_workers", "--data.num_workers"),)),
            "override",
            "--data.num_workers=4",
            "num_workers: 2 -> 4 on the command line",
        ),
    ],
)
def test_remedy_text_follows_from_where_the_loader_is_made(
    loader_code: LoaderCode | None, form: str, code: str, where: str
) -> None:
    (remedy,) = decide(measured(loaders=BUSY, experiments={"tried": FASTER}, loader_code=loader_code)).remedies
    assert (remedy.form, remedy.code, remedy.where) == (form, code, where)


def test_settings_that_wrap_ignores_are_set_on_the_inner_loader() -> None:
    loader_code = LoaderCode(
        words="wrap(data, LoaderSettings(...))", form="settings", inner="your DataLoader (data.py:3)"
    )
    (remedy,) = decide(measured(loaders=ASLEEP | {"head_of_line_pct": 50.0}, loader_code=loader_code)).remedies
    assert (remedy.form, remedy.code, remedy.where) == (
        "arguments",
        "in_order=False",
        "in_order: not set -> False in your DataLoader (data.py:3)",
    )


def test_settings_without_a_command_line_key_are_set_in_the_program() -> None:
    loader_code = LoaderCode(words="your DataLoader (data.py:3)", overrides=(("num_workers", "data.num_workers"),))
    (remedy,) = decide(measured(loaders=ASLEEP | {"head_of_line_pct": 50.0}, loader_code=loader_code)).remedies
    assert (remedy.form, remedy.code) == ("arguments", "in_order=False")


def test_settings_that_autotune_does_not_set_give_no_remedy() -> None:
    loader_code = LoaderCode(words="your training DataLoader (made by timm)", form="callback")
    assert decide(measured(loaders=ASLEEP | {"head_of_line_pct": 50.0}, loader_code=loader_code)).remedies == ()


def _code_of_new_workers(**facts: Any) -> str:
    """Code of the remedy for a loader without workers, for which three workers are faster in trials."""
    run = {"num_workers": 0, "load_cpu_ms": 40.0, "prefetch_factor": None}
    experiments = {"tried": tried((0, 100.0), (3, 40.0))}
    return decide(measured(**{**run, "experiments": experiments, **facts})).remedies[0].code


def test_new_workers_are_not_made_persistent() -> None:
    assert _code_of_new_workers(may_persist=True, persistent_workers=False) == "num_workers=3"


def test_new_workers_pin_their_batches_for_a_device() -> None:
    def code(**facts: Any) -> str:
        return _code_of_new_workers(**{"pin_memory": False, "device_type": "cuda", **facts})

    assert code() == "num_workers=3, pin_memory=True"
    assert code(num_workers=2, loaders=BUSY, experiments={"tried": FASTER}) == "num_workers=4, pin_memory=True"
    for without in ({"device_type": "cpu"}, {"pin_memory": True}, {"pin_memory": None}, {"ours": True}):
        assert code(**without) == "num_workers=3"
    one_key = LoaderCode(words="", overrides=(("num_workers", "--data.num_workers"),))
    assert code(loader_code=one_key) == "--data.num_workers=3"
    two_keys = LoaderCode(words="", overrides=(*one_key.overrides, ("pin_memory", "--data.pin")))
    assert code(loader_code=two_keys) == "--data.num_workers=3 --data.pin=true"


def test_persistent_workers_are_advised_with_the_seconds_they_save_and_their_condition() -> None:
    (remedy,) = decide(measured(**SLOW_START, **STARTS)).remedies
    assert remedy.why[0].kind == "starts again"
    assert remedy.why[0].figures["s"] == pytest.approx(0.5, abs=0.005)
    assert remedy.effects == ("random numbers", "copies of the dataset")


@pytest.mark.parametrize(
    ("trials", "workers"), [((), 2), (((2, 100.0), (5, 40.0)), 5), (((2, 100.0), (0, 60.0)), 0), (((2, 90.0),), 2)]
)
def test_crop_remedy_uses_the_number_of_workers_chosen(trials: Any, workers: int) -> None:
    experiments = {"crops": CROPS, "tried": tried(*trials) if trials else ()}
    (remedy,) = [
        remedy for remedy in decide(measured(**WHOLE, experiments=experiments)).remedies if remedy.form == "replacement"
    ]
    assert f"LoaderSettings(num_workers={workers})" in remedy.code


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({}, "--data.num_workers=0"),
        ({"persistent_workers": True}, None),
        ({"prefetch_factor": 4}, None),
    ],
)
def test_zero_workers_are_not_advised_with_settings_that_need_workers(facts: dict[str, Any], code: str | None) -> None:
    loader_code = LoaderCode(words="", overrides=(("num_workers", "--data.num_workers"),))
    diagnosis = decide(measured(**CONTRACTS["fewer workers"].run, loader_code=loader_code, **facts))
    assert [remedy.code for remedy in diagnosis.remedies] == ([code] if code else [])


# --- where all CPUs work ------------------------------------------------------------------------------------------

CPUS_TAKEN = [(1, 1), (1, 2), (2, 2), (3, 4), (7, 8), (14, 16), (15, 16), (16, 16), (64, 16), (170, 192), (190, 192)]
"""Workers on CPUs, which leave hardly a CPU free beside the training thread."""
TRY_NUMBERS = (
    "`LIGHTNING_FEED=tune python train.py` tries numbers of workers if samples stay the same, and takes the fastest"
)
CPUS_FREE = [(1, 3), (1, 4), (2, 4), (4, 16), (13, 16), (100, 192), (165, 192)]
LESS_WORK = ("decoder", "backend", "quality", "root")
"""Settings of an ImageFolderDataModule that give a sample less work."""
SCARCE = {"workers_on_cpu_pct": 50.0, "workers_run_queue_pct": 45.0, "workers_blocked_pct": 5.0}


def _next(run: dict[str, Any]) -> str:
    return next_step(decide(measured(**run)), RunIdentity(program="train.py"))


@pytest.mark.parametrize("loaders", [BUSY, SCARCE], ids=["cpu", "oversubscribed"])
@pytest.mark.parametrize(("workers", "cpus"), CPUS_TAKEN)
def test_workers_that_take_all_cpus_are_not_added_to(workers: int, cpus: int, loaders: Any) -> None:
    taken = {"loaders": loaders, "num_workers": workers, "usable_cpus": cpus}
    assert not any(change.startswith("num_workers=") for change in _changes(taken))
    diagnosed = "`lightning-feed diagnose train.py`"
    finds_lines = f"{diagnosed} finds the lines of your code that take the time"
    assert _next(taken | CUDA) == (TRY_NUMBERS if loaders == SCARCE and workers > cpus else finds_lines)
    assert _next(taken) == (TRY_NUMBERS if loaders == SCARCE else finds_lines)  # fewer leave CPUs to the model
    images = DECODING | taken
    assert _next(images) == f"{diagnosed} tries ways with less work for each sample"
    other_remedy = images | CUDA | {"copy": 30.0}
    assert _changes(other_remedy) == ["prefetch_callback=True"]
    assert _next(other_remedy) == _next(images)
    assert _next(taken | {"loop": "plain"}) == "make a batch with less work"


@pytest.mark.parametrize(("workers", "cpus"), CPUS_FREE)
def test_more_workers_are_to_be_tried_while_a_sizeable_number_of_cpus_is_free(workers: int, cpus: int) -> None:
    free = DECODING | {"data": 80.0, "num_workers": workers, "usable_cpus": cpus}
    assert _changes(free) == []
    assert _next(free) == TRY_NUMBERS


UNTRIED: dict[str, dict[str, Any]] = {
    "busy workers": {"loaders": BUSY},
    "waiting workers": {"loaders": ASLEEP},
    "workers that read from a disk": {"loaders": COLD},
    "workers that nobody observed": {},
    "no workers": {"num_workers": 0, "load_cpu_ms": 40.0},
    "another remedy, for the transfer": {"loaders": BUSY, "copy": 30.0, **CUDA},
}
"""Training waits for batches that take time to make, and no number of workers was tried."""


@pytest.mark.parametrize("name", UNTRIED)
def test_the_next_step_tries_numbers_of_workers_that_no_remedy_names(name: str) -> None:
    diagnosis = decide(measured(**UNTRIED[name]))
    assert not any("num_workers" in remedy.code for remedy in diagnosis.remedies)
    assert "diagnose" not in kinds(diagnosis.notes)
    assert next_step(diagnosis, RunIdentity(program="train.py")) == TRY_NUMBERS
    assert next_step(diagnosis, RunIdentity(program="notebook")) == (
        "train with LIGHTNING_FEED=tune, or with `AutotuneCallback()`: it tries numbers of workers if samples stay the "
        "same, and takes the fastest"
    )


@pytest.mark.parametrize("run", [UNTRIED["busy workers"], UNTRIED["no workers"]], ids=["workers", "no workers"])
@pytest.mark.parametrize(
    "facts",
    [
        {"data": 1.0},
        {"experiments": {}},
        {"tuned": True},
        {"why_no_workers": "dataset.pool belongs to this process"},
        {"map_style": False},
        {"map_style": False, "shards_by_worker": True},
        {"every_num_workers": (2, 2)},
        {"workers": "thread"},
        {"num_workers": None},
        {"stage": "validate"},
        {"loop": "plain"},
        {"loaders": READY, "num_workers": 2},
    ],
    ids=str,
)
def test_numbers_of_workers_are_not_to_be_tried_where_they_cannot_be_or_were(
    run: dict[str, Any], facts: dict[str, Any]
) -> None:
    diagnosis = decide(measured(**run | facts))
    assert not any("num_workers" in remedy.code for remedy in diagnosis.remedies)
    assert "tries numbers of workers" not in next_step(diagnosis, RunIdentity(program="train.py"))


def test_a_loader_that_autotune_cannot_tune_is_diagnosed() -> None:
    for facts in ({"map_style": False, "shards_by_worker": True}, {"every_num_workers": (2, 2)}):
        assert _next({"loaders": BUSY, **facts}).startswith("`lightning-feed diagnose train.py` finds the lines")
    assert (
        _next({"loaders": BUSY, "loop": "plain"}) == "`lightning_feed.tune(loader)` tries other settings of this loader"
    )


def test_workers_of_all_loaders_count_as_taking_cpus() -> None:
    """Three loaders with five workers each."""
    run = {"loaders": BUSY, "num_workers": 5, "usable_cpus": 16}
    assert may_try_workers(measured(**run, every_num_workers=(5,)), "cpu")
    assert not may_try_workers(measured(**run, every_num_workers=(5, 5, 5)), "cpu")


@given(
    taken=st.sampled_from(CPUS_TAKEN),
    loaders=st.sampled_from([BUSY, SCARCE]),
    data=st.floats(30.0, 90.0),
    trials=st.lists(
        st.tuples(st.sampled_from([DECODER, NVJPEG, FAST, PACKED]), st.floats(0.0, 1.2)), min_size=1, max_size=6
    ),
)
def test_the_first_remedy_for_images_on_busy_cpus_is_less_work(
    taken: Any, loaders: Any, data: float, trials: Any
) -> None:
    """If any way that was tried takes a tenth of the work or more away, and no number of workers was faster."""
    workers, cpus = taken
    lighter = tuple(replace(trial, then_ms=share * trial.now_ms) for trial, share in trials)
    experiments = {"lighter": lighter, "tried": tried((workers, 100.0), (workers + 1, 99.0))}
    run = DECODING | {"loaders": loaders, "data": data, "num_workers": workers, "usable_cpus": cpus}
    remedies = decide(measured(**run, experiments=experiments)).remedies
    if min(share for _, share in trials) <= 0.9:
        assert setting_of(remedies[0]) in LESS_WORK
    for remedy in remedies:
        assert setting_of(remedy) in LESS_WORK
        assert remedy.least_step_ms is not None
        assert remedy.least_step_ms >= 100.0 - data - 1e-6


def test_less_work_is_sorted_by_gain_and_says_what_it_changes() -> None:
    small = replace(PACK, path="birds-256.pack", decoded=False)
    trials = (FAST, DECODER, NVJPEG, replace(PACKED, then_ms=3.0, pack=small), replace(PACKED, then_ms=3.0))
    diagnosis = decide(measured(**DECODING | {"data": 95.0}, experiments={"lighter": trials}))
    assert [(remedy.code, remedy.where, kinds(remedy.why)) for remedy in diagnosis.remedies] == [
        (
            'backend="nvjpeg"',
            "backend: torch -> nvjpeg in the call that makes your ImageFolderDataModule",
            ["less CPU", "GPU decodes"],
        ),
        (
            'decoder="auto"',
            "decoder: pillow -> auto in the call that makes your ImageFolderDataModule",
            ["less CPU", "fastest decoder"],
        ),
        (
            "lightning-feed pack birds birds-256.pack --size 256",
            "root: birds -> birds-256.pack in the call that makes your ImageFolderDataModule, after this command",
            ["less CPU", "images stored"],
        ),
    ]
    assert [remedy.least_step_ms for remedy in diagnosis.remedies] == pytest.approx([40.0, 50.0, 75.0])


# --- notes, and what would not help -------------------------------------------------------------------------------


def test_why_not_field_lists_more_workers_that_were_tried_without_gain() -> None:
    diagnosis = decide(measured(experiments={"tried": tried((2, 90.0), (3, 95.0), (4, 89.0))}, loaders=BUSY))
    assert diagnosis.remedies == ()
    assert diagnosis.why_not == (Note.of("more workers in vain", ms=89.0, own_ms=90.0),)


def test_why_not_field_lists_decoding_only_crops_with_little_gain() -> None:
    """The report of the fit had sent to a diagnosis for them."""
    run: dict[str, Any] = {"num_workers": 0, "usable_cpus": 1, "data": 25.0, "load_cpu_ms": 25.0, "load_queue_ms": 0.0}
    experiments = {
        "crops": CropTrial(folder="birds", whole_ms=1.85, crop_ms=1.51),
        "tried": tried((0, 50.0), (1, 60.0)),
    }
    diagnosis = decide(measured(**run, experiments=experiments))
    assert diagnosis.remedies == ()
    assert diagnosis.why_not[-1] == Note.of("crops in vain", whole_ms=1.85, crop_ms=1.51)
    worth_it = experiments | {"crops": CropTrial(folder="birds", whole_ms=1.85, crop_ms=0.5)}
    diagnosis = decide(measured(**run, experiments=worth_it))
    assert [remedy.form for remedy in diagnosis.remedies] == ["replacement"]
    assert "crops in vain" not in kinds(diagnosis.why_not)


def test_a_stream_with_ready_batches_gets_no_note_on_more_workers() -> None:
    ready = measured(step=20.0, data=3.0, loaders=READY, num_workers=1, map_style=False)
    assert decide(ready).cause == "hand-over"
    assert "may repeat samples" not in kinds(decide(ready).notes)


def test_workers_are_not_advised_for_a_stream_that_may_not_shard_itself() -> None:
    stream = measured(num_workers=0, load_cpu_ms=40.0, map_style=False)
    diagnosis = decide(stream)
    assert diagnosis.remedies == ()
    assert diagnosis.notes[0] == Note.of("may repeat samples")
    divided = decide(measured(num_workers=0, load_cpu_ms=40.0, map_style=False, shards_by_worker=True))
    assert "may repeat samples" not in kinds(divided.notes)


@pytest.mark.parametrize("experiments", [{}, {"tried": tried((0, 100.0), (2, 50.0))}], ids=["a fit", "diagnose"])
def test_workers_are_not_advised_for_a_dataset_that_a_fork_breaks(experiments: Any) -> None:
    run: dict[str, Any] = {"num_workers": 0, "load_cpu_ms": 40.0, "experiments": experiments or None}
    reason = "dataset.pool (concurrent.futures.ThreadPoolExecutor) belongs to this process"
    assert _changes(run) == (["num_workers=2"] if experiments else [])
    diagnosis = decide(measured(**run, why_no_workers=reason))
    assert diagnosis.remedies == ()
    assert diagnosis.notes[0] == Note.of("no workers allowed", why=reason)


def test_notes_mention_a_worker_search_that_ran_out_of_time() -> None:
    trials = tried((0, 100.0), (2, 50.0))
    for out_of_time in (True, False):
        diagnosis = decide(measured(num_workers=0, experiments={"tried": trials, "out_of_time": out_of_time}))
        assert ("search ran out of time" in kinds(diagnosis.notes)) is out_of_time


@pytest.mark.parametrize("data", [40.0, 0.0], ids=["data-bound", "fed"])
def test_notes_begin_with_an_epoch_that_was_cut_short(data: float) -> None:
    diagnosis = decide(measured(data=data, cut_short=(40, 80)))
    assert diagnosis.notes[0] == Note.of("epoch cut short", batches=40, length=80)
    assert "epoch cut short" not in kinds(decide(measured(data=data)).notes)


def test_a_slow_user_callback_gives_a_note_and_no_remedy() -> None:
    """Nobody can know whether it may be left out: a moving average of the weights may not."""
    places = (HookCode(name=SLOW, at="train.py:12"),)
    for known, at in [(places, "train.py:12"), ((), "")]:
        diagnosis = decide(measured(data=0.0, other=25.0, **THEIRS | {"hook_code": known}))
        assert (diagnosis.cause, diagnosis.remedies) == ("hooks", ())
        assert diagnosis.notes[0] == Note.of("rarer hook", hook=SLOW, at=at, interval="", ms=20.0, step_ms=100.0)
    diagnosis = decide(measured(data=0.0, other=25.0, **THEIRS))
    assert diagnosis.remedies == ()
    assert diagnosis.notes[0].names["interval"] == "every_n_steps"


def test_trainer_arguments_of_a_cli_are_changed_on_the_command_line() -> None:
    loader_code = LoaderCode(words="", trainer_key="--trainer.")
    for run, code in [
        ({"hooks": LOG, "log_every_n_steps": 1}, "--trainer.log_every_n_steps=50"),
        (
            {"hooks": BAR, "bar_refresh_rate": 1},
            "--trainer.callbacks+=lightning.pytorch.callbacks.TQDMProgressBar --trainer.callbacks.refresh_rate=50",
        ),
    ]:
        (remedy,) = decide(measured(data=0.0, other=25.0, loader_code=loader_code, **run)).remedies
        assert (remedy.form, remedy.code) == ("override", code)
        assert remedy.where.endswith("50 on the command line")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("name", ["prefetch callback", "rare progress bar", "rarer checkpoints"])
def test_callbacks_are_imported_from_the_lightning_package_in_use(name: str, package: str) -> None:
    (remedy,) = decide(measured(**(CONTRACTS[name].run | {"package": package}))).remedies
    ours = "lightning_feed" if package == "lightning.pytorch" else "lightning_feed.pl"
    source = ours if name == "prefetch callback" else f"{package}.callbacks"
    assert f"with `from {source} import " in remedy.where


def test_steps_dominated_by_python_get_one_note_and_no_remedy() -> None:
    diagnosis = decide(measured(step=1.0, data=0.4, num_workers=0, load_cpu_ms=0.4, map_style=False))
    assert (diagnosis.remedies, diagnosis.why_not) == ((), ())
    assert diagnosis.notes == ()


def test_a_rarely_refreshed_progress_bar_gets_a_note_and_no_remedy() -> None:
    diagnosis = decide(measured(data=0.0, other=25.0, hooks=BAR, bar_refresh_rate=100))
    assert diagnosis.remedies == ()
    assert diagnosis.notes[0].kind == "rarer bar"
    assert "rarer bar" not in kinds(decide(measured(data=0.0, other=25.0, hooks=BAR, bar_refresh_rate=1)).notes)


OWN_DATA = LoaderCode(words="your training DataLoader (Data.train_dataloader, data.py:41)", datamodule="Data")
WRAP = "from lightning_feed import FastDataModule\nFastDataModule.wrap(Data(...))"
PINNING = READY | {"handover_pct": 0.0, "pin_lag_ms": 38.0}


@pytest.mark.parametrize(
    ("run", "code", "saved_ms"),
    [
        ({"loaders": READY}, WRAP, 40.0),
        ({"loaders": PINNING, **CUDA}, WRAP, 40.0),
        ({"loaders": READY, "copy": 20.0, **CUDA, "pin_memory": False}, WRAP, 60.0),
        ({"data": 0.0, "copy": 20.0, **CUDA}, WRAP, 20.0),
        ({"loaders": BUSY, "copy": 20.0, **CUDA, "pin_memory": False}, WRAP, 20.0),  # making batches is another matter
        (
            {"loaders": BUSY, "copy": 20.0, **CUDA, "pin_memory": False, "experiments": {"tried": FASTER}},
            WRAP,
            20.0,
        ),  # beside more workers, which would pin otherwise
        ({"loaders": READY, "map_style": False}, WRAP, 40.0),  # a stream
        ({"loaders": READY, "map_style": False, "tuned": True}, WRAP, 40.0),
        ({"loaders": READY, "loader_code": replace(OWN_DATA, datamodule="")}, "AutotuneCallback()", 40.0),
        (
            {"loaders": READY, "loader_code": replace(OWN_DATA, trainer_key="--trainer.")},
            "--trainer.callbacks+=lightning_feed.AutotuneCallback",
            40.0,
        ),
    ],
)
def test_batches_in_place_save_at_most_what_handing_over_and_copying_takes(
    run: dict[str, Any], code: str, saved_ms: float
) -> None:
    diagnosis = decide(measured(**({"loader_code": OWN_DATA, **BY_TORCH} | run)))
    remedy = next(remedy for remedy in diagnosis.remedies if str(remedy.change) == "hand_over=slots")
    assert (remedy.code, remedy.least_step_ms) == (code, pytest.approx(100.0 - saved_ms))
    if saved_ms > 20:
        assert remedy == diagnosis.remedies[0]
    assert not any("pin_memory" in each.code for each in diagnosis.remedies)
    assert not {"pin", "pin thread"} & set(kinds(diagnosis.notes))


def test_the_callback_that_copies_ahead_comes_after_batches_in_place() -> None:
    diagnosis = decide(measured(data=0.0, copy=40.0, **CUDA, **BY_TORCH))
    assert [str(remedy.change) for remedy in diagnosis.remedies] == ["hand_over=slots", "prefetch_callback=True"]


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"pin_memory": False, "stage": "validate"}, "pin"),
        ({"pin_memory": True}, "pin method"),
        ({"pin_memory": True, "in_place": True}, "lock memory"),
    ],
)
def test_notes_say_why_batches_are_in_pageable_memory(facts: dict[str, Any], kind: str) -> None:
    diagnosis = decide(measured(data=0.0, copy=40.0, **CUDA | {"pinned": False} | facts))
    assert diagnosis.notes[0].kind == kind
