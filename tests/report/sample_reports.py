"""Diagnoses and reports to try the writers on: every figure known, none known, and what a user could name badly."""

from dataclasses import replace
from typing import Any

from verdict.cases import changed_facts, loop_facts

from lightning_feed.measure.experiment_results import ExperimentResults, FunctionCost, KeyBytes, NamedCost, TriedSetting
from lightning_feed.measure.measurements import HookTime, LoopFacts, Measurements
from lightning_feed.measure.stats import Bin, LoaderStats, RankStats, StarvationStats, Stretch, Timeline
from lightning_feed.report.document import make_report
from lightning_feed.report.report import Environment, Report, RunIdentity
from lightning_feed.verdict.diagnosis import Change, Diagnosis, Note, Remedy

WHEN = "2026-03-01T12:30:00+00:00"
HOSTILE = "</title><script>alert('x')</script>&\"|`*_[a](javascript:x)\n# no heading"


def sample_stats(**changes: Any) -> StarvationStats:
    stats = StarvationStats(
        steps=412,
        confidence="high",
        starved_pct=33.9,
        starved_low_pct=32.1,
        starved_high_pct=35.8,
        input_pct=35.2,
        speedup_if_free=1.51,
        prefetch_active=None,
        step_ms=87.2,
        compute_ms=52.9,
        copy_ms=1.1,
        data_ms=29.6,
        other_ms=3.6,
        next_wait_ms=31.6,
        hidden_wait_ms=2.0,
        epoch_start_s=0.8,
    )
    return replace(stats, **changes)


def sample_facts(**changes: Any) -> LoopFacts:
    facts = loop_facts(
        device_type="cuda",
        num_workers=6,
        prefetch_factor=2,
        pin_memory=True,
        persistent_workers=True,
        in_order=True,
        workers="process",
        map_style=True,
        ours=False,
        batch_size=32,
        size_bytes=4_816_896,
        tensors=2,
        batches_per_epoch=500,
        usable_cpus=20,
        lightning="2.6.6",
    )
    return changed_facts(facts, **changes)


def sample_timeline() -> Timeline:
    """A run that waits more and more; its slow steps are those that wait."""
    return Timeline(
        stretches=tuple(Stretch(steps=103, step_ms=87.2, starved_pct=pct) for pct in (20.0, 30.0, 40.0, 46.0)),
        bins=(
            Bin(from_ms=40.0, to_ms=60.0, steps=200, starved_pct=0.0),
            Bin(from_ms=60.0, to_ms=90.0, steps=12, starved_pct=25.0),
            Bin(from_ms=90.0, to_ms=135.0, steps=200, starved_pct=50.0),
        ),
    )


def sample_experiments() -> ExperimentResults:
    return ExperimentResults(
        batch_size=32,
        model_per_s=18.4,
        loader_per_s=11.6,
        loader_start_s=0.4,
        cached_bytes_per_s=12.9,
        no_transform_per_s=16.0,
        costs=(
            NamedCost(name="read", cpu_ms=0.4, wall_ms=1.9),
            NamedCost(name="decode", cpu_ms=9.6, wall_ms=9.8),
            NamedCost(name="RandomResizedCrop", cpu_ms=3.1, wall_ms=3.2),
            NamedCost(name="ColorJitter", cpu_ms=1.4, wall_ms=1.4),
        ),
        ceiling_per_s=95.0,
        samples_ms=390.0,
        collate_ms=41.0,
        functions=(
            FunctionCost(
                name="Birds.__getitem__",
                file="project/birds.py",
                line=41,
                calls="ColorJitter",
                stage="samples",
                ms_per_batch=120.0,
            ),
        ),
        tried=(
            TriedSetting(num_workers=6, prefetch_factor=2, step_ms=87.0, shortest_ms=84.0, longest_ms=91.0, own=True),
            TriedSetting(
                num_workers=12, prefetch_factor=2, step_ms=58.0, shortest_ms=57.0, longest_ms=60.0, chosen=True
            ),
        ),
        why_chosen="the fastest of 2 tried",
        keys=(KeyBytes(name="0", bytes_per_batch=4_816_896), KeyBytes(name="1", bytes_per_batch=256)),
        left_out=(("cached-files", "an iterable dataset decides itself which samples come"),),
    )


def sample(*, stats: StarvationStats | None = None, facts: LoopFacts | None = None, **changes: Any) -> Diagnosis:
    """A GPU that waits for six workers that decode."""
    measured = Measurements(
        stats=stats or sample_stats(),
        facts=facts or sample_facts(),
        loaders=LoaderStats(workers_on_cpu_pct=91.0, workers_run_queue_pct=4.0, workers_blocked_pct=5.0),
        ranks=RankStats(world_size=2, steps=412, starved_pct=35.0, slow_rank=1, data_ms_by_rank=(11.0, 29.6)),
        hooks=(HookTime(name="[Callback]ModelCheckpoint.on_train_batch_end", ms_per_step=2.4),),
        timeline=sample_timeline(),
        experiments=sample_experiments(),
        diagnosed=True,
    )
    diagnosis = Diagnosis(
        bottleneck="data",
        cause="cpu",
        grade="highly data-bound",
        confidence="high",
        evidence=(
            Note.of("part of the step", part="data", ms=29.6, step_ms=87.2, pct=34.0, by_ranks=False),
            Note.of("workers", workers=6, cpus=20),
        ),
        remedies=(
            Remedy(
                code="FastDataModule(loader=LoaderSettings(num_workers=14))",
                why=(Note.of("more at once"),),
                least_step_ms=57.6,
                change=Change("num_workers", "14"),
            ),
            Remedy(
                code='ImageFolderDataModule(root, decoder="turbo")',
                why=(Note.of("less CPU", then_ms=2.0, now_ms=4.0),),
                least_step_ms=61.0,
                change=Change("decoder", "turbo"),
            ),
            Remedy(code="def device_transform(self, batch, split): ...", why=(Note.of("copies wait"),)),
        ),
        measurements=measured,
    )
    return replace(diagnosis, **changes)


def saying(text: str) -> Note:
    """A note with this text in its sentence."""
    return Note.of("fastest decoder", decoder=text)


def nothing_measured() -> Diagnosis:
    return Diagnosis(
        bottleneck="unknown",
        grade="not measured",
        confidence="low",
        evidence=(Note.of("too few steps", steps=3, needed=10),),
        remedies=(),
        measurements=Measurements(stats=StarvationStats(steps=3, confidence="low")),
    )


def sample_environment(**changes: Any) -> Environment:
    environment = Environment(
        lightning_feed="0.1.0",
        python="3.11.9",
        torch="2.15.0",
        lightning="2.6.6",
        platform="Linux-6.8-x86_64",
        cpu="Example CPU 9000",
        device="Example GPU",
        usable_cpus=20,
        cpu_reason="CPUs that this process may run on (affinity)",
    )
    return replace(environment, **changes)


def sample_report(diagnosis: Diagnosis | None = None) -> Report:
    report = make_report(diagnosis or sample(), run=RunIdentity())
    return replace(report, environment=sample_environment(), written_at=WHEN)
