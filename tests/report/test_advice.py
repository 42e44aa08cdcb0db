"""Advice over all kinds of runs: nothing that disagrees, nothing that was not tried, no circle and no dead end."""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from verdict.cases import BUSY, READY, measured

from lightning_feed.measure.experiment_results import TriedSetting
from lightning_feed.measure.measurements import LoaderCode
from lightning_feed.measure.wall import WallPart, WallStats
from lightning_feed.report.next_step import next_step, other_notes
from lightning_feed.report.report import RunIdentity, is_toy
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Diagnosis, Remedy
from lightning_feed.verdict.remedies import setting_of

RUN = RunIdentity(program="train.py")
BLOCKED: dict[str, Any] = {"workers_on_cpu_pct": 4.0, "workers_run_queue_pct": 2.0, "workers_blocked_pct": 94.0}
LOADERS: list[dict[str, Any]] = [
    {},
    BUSY,
    READY,
    BLOCKED,
    BLOCKED | {"page_cache_pct": 3.0, "disk_mb_per_s": 300.0},
    {"workers_on_cpu_pct": 40.0, "workers_run_queue_pct": 55.0, "workers_blocked_pct": 5.0},
    BLOCKED | {"head_of_line_pct": 80.0},
    BLOCKED | {"queue_ready": 7.0, "queue_capacity": 8.0},
]
CODE = LoaderCode(words="your training DataLoader (Birds.train_dataloader, train.py:9)", datamodule="Birds")


@dataclass(frozen=True)
class Case:
    """A run, and what the user has done about it so far."""

    seconds: float
    data: float
    copy: float
    other: float
    epoch_start_s: float
    batches: int
    loaders: tuple[tuple[str, Any], ...]
    facts: tuple[tuple[str, Any], ...]
    diagnosed: bool = False
    prefetches: bool = False

    def diagnosis(self) -> Diagnosis:
        facts = dict(self.facts)
        experiments: dict[str, Any] | None = None
        if self.diagnosed:
            own = TriedSetting(
                num_workers=facts["num_workers"], prefetch_factor=2, step_ms=100.0, shortest_ms=99.0, longest_ms=101.0,
                own=True, chosen=True,
            )  # fmt: skip
            experiments = {"tried": (own,), "why_chosen": "none gained"}
        wall = WallStats(wall_s=self.seconds, parts=(WallPart(name="train", seconds=self.seconds, times=1),))
        made = measured(
            data=self.data,
            copy=self.copy if facts["device_type"] == "cuda" else 0.0,
            other=self.other,
            stats={"epoch_start_s": self.epoch_start_s, "prefetch_active": self.prefetches},
            loaders=dict(self.loaders) if facts["num_workers"] else {},
            experiments=experiments,
            wall=wall,
            batches_per_epoch=self.batches,
            **facts,
        )
        return decide(made)

    def with_facts(self, **facts: Any) -> "Case":
        return replace(self, facts=tuple((dict(self.facts) | facts).items()))


def follow(case: Case, diagnosis: Diagnosis, step: str) -> Case | None:
    """The run after its user has done what ``next:`` says, in vain; None if it says that there is nothing to do."""
    if "LIGHTNING_FEED=tune" in step:
        return case.with_facts(tuned=True, tuned_outside=False)
    if "lightning-feed tune" in step:
        return case.with_facts(tuned=True, tuned_outside=True)
    if "lightning-feed diagnose" in step:
        return replace(case, diagnosed=True)
    if step.startswith("nothing"):
        return None
    pasted = [remedy for remedy in diagnosis.remedies if remedy.code in step or "paste the first fix" in step]
    if pasted:
        change = pasted[0].change
        assert change is not None
        setting = change.setting
        if setting == "hand_over":
            return case.with_facts(in_place=True, may_use_slots=False, pinned=True)
        if setting == "prefetch_callback":
            return replace(case, prefetches=True)
        values = {"True": True, "False": False}
        return replace(case.with_facts(**{setting: values.get(change.value, change.value)}), diagnosed=False)
    return None


@st.composite
def cases(draw: Any) -> Case:
    workers = draw(st.sampled_from([0, 1, 2, 4, 8, 16]))
    facts = {
        "device_type": draw(st.sampled_from(["cpu", "cuda"])),
        "num_workers": workers,
        "every_num_workers": (workers,),
        "workers": "process" if workers else None,
        "persistent_workers": bool(workers) and draw(st.booleans()),
        "may_persist": True,
        "pin_memory": draw(st.booleans()),
        "in_place": False,
        "may_use_slots": bool(workers) and draw(st.booleans()),
        "map_style": draw(st.sampled_from([True, True, False])),
        "usable_cpus": draw(st.sampled_from([2, 4, 16, 64])),
        "tuned": draw(st.booleans()),
        "tuned_outside": draw(st.booleans()),
        "loader_code": CODE,
        "max_epochs": 10,
    }
    data = draw(st.sampled_from([0.0, 3.0, 8.0, 30.0, 70.0]))
    copy = draw(st.sampled_from([0.0, 10.0, 25.0]))
    return Case(
        seconds=draw(st.sampled_from([20.0, 600.0])),
        data=data,
        copy=copy if data + copy < 90 else 0.0,
        other=draw(st.sampled_from([0.0, 2.0])),
        epoch_start_s=draw(st.sampled_from([0.0, 0.1, 5.0])),
        batches=draw(st.sampled_from([10, 1000])),
        loaders=tuple(draw(st.sampled_from(LOADERS)).items()),
        facts=tuple(facts.items()),
        diagnosed=draw(st.booleans()),
    )


def is_tried(remedy: Remedy) -> bool:
    return remedy.tried_ms is not None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_advice_is_consistent_and_ends(case: Case) -> None:
    seen: list[Case] = []
    now: Case | None = case
    while now is not None:
        assert now not in seen, [next_step(each.diagnosis(), RUN) for each in seen]
        seen.append(now)
        diagnosis = now.diagnosis()
        step = next_step(diagnosis, RUN)
        notes = other_notes(diagnosis, RUN)
        assert step
        for remedy in diagnosis.remedies:
            assert setting_of(remedy) != "num_workers" or is_tried(remedy)
        if not is_toy(diagnosis):
            commands = [note for note in notes if "lightning-feed" in note or "LIGHTNING_FEED=" in note]
            assert not commands or "nothing" in step, (step, notes)
        facts = dict(now.facts)
        assert not facts["tuned"] or "feed tune" not in step
        assert not facts["tuned"] or "=tune" not in step or (facts["tuned_outside"] and "in place" in step)
        now = follow(now, diagnosis, step)
