"""The words of each kind of note, with all of its figures and with none."""

from dataclasses import replace
from typing import get_args

import pytest
from report.sample_reports import sample

from lightning_feed.measure.stats import StarvationStats
from lightning_feed.report.words import UNKNOWN, WORDS, words
from lightning_feed.verdict.diagnosis import Note, NoteKind

MEASURED = sample().measurements


def test_each_kind_of_note_has_words() -> None:
    assert set(WORDS) == set(get_args(NoteKind))


@pytest.mark.parametrize("kind", get_args(NoteKind))
def test_a_note_without_figures_is_a_sentence_with_unknowns(kind: NoteKind) -> None:
    """As after a report was changed by hand."""
    sentence = words(Note.of(kind), MEASURED)
    assert "{" not in sentence
    assert "None" not in sentence


@pytest.mark.parametrize(
    ("note", "sentence"),
    [
        (
            Note.of("part of the step", part="data", ms=30, step_ms=100, pct=30, by_ranks=True),
            "30.0 of 100.0 ms (30 %) waiting for data, the slowest rank of each step",
        ),
        (
            Note.of("device wait", at="train.py:82", code="loss.item()", cost_pct=0, busy_pct=97),
            "train.py:82 waits for the GPU in each step (`loss.item()`), which costs nothing: the GPU is busy 97 % of "
            "the step itself",
        ),
        (
            Note.of("device wait", at="train.py:82", code="", cost_pct=30, busy_pct=70),
            "train.py:82 waits for the GPU in each step, which costs up to 30 % of a step: the GPU is busy 70 % of the "
            "step itself",
        ),
        (Note.of("device wait", at="train.py:82", code=""), "train.py:82 waits for the GPU in each step"),
        (Note.of("workers", workers=1, in_place=False), "the loader has 1 worker"),
        (
            Note.of("workers", workers=2, cpus=2, in_place=True, on_cpu_pct=91, queue_pct=4, blocked_pct=5),
            "the loader has 2 workers on 2 CPUs, with batches in place: on a CPU 91 % of the time, waiting for one 4 "
            "%, blocked 5 %",
        ),
        (Note.of("takes turns", stage="validate"), "num_workers=0, so loading and validation take turns"),
        (
            Note.of("making a batch", ms=16, pct=75, stage="collate", function="pad", at="text.py:7"),
            "a batch takes 16.0 ms in one process, collating them 75 %, most of it in pad (text.py:7)",
        ),
        (
            Note.of(
                "rarer hook", hook="Slow.on_train_batch_end", at="a.py:1", interval="every_n_steps", ms=4, step_ms=9
            ),
            "Slow.on_train_batch_end (a.py:1) takes 4.0 of 9.0 ms a step; if it only observes, every 50th step is "
            "enough (every_n_steps=50)",
        ),
        (
            Note.of("loading here", ms=40, cpu_ms=30, queue_ms=10, generator="batches (train.py:12)"),
            "batches (train.py:12) takes 40.0 ms in the training process, 30.0 of them on a CPU and 10.0 waiting for "
            "one",
        ),
        (
            Note.of("in memory", batches_per_s=20, own_batches_per_s=10),
            "files are read from storage: with them in memory the loader alone gives 640 samples/s instead of 320",
        ),
        (Note.of("diagnose", tries="lines"), "`SELF` finds the lines of your code that take the time"),
        (Note.of("copied once").of_validation(), "in validation: the files are copied once, if they fit"),
        (
            Note.of("pixels stored", pack_bytes=2**21, folder_bytes=2**20, short_side_px=256),
            "pixels are stored in 2.0 MiB beside the 1.0 MiB of files, 256 pixels on the shorter side, so crops of "
            "small regions are less sharp",
        ),
    ],
)
def test_sentences_have_the_figures_of_their_note(note: Note, sentence: str) -> None:
    assert words(note, MEASURED, diagnose="SELF") == sentence


def test_names_of_a_file_are_no_forms() -> None:
    """A report may have been written by anybody."""
    evil = "{ms.__class__}{"
    assert evil not in words(Note.of("part of the step", part=evil, ms=1.0), MEASURED)
    assert words(Note.of("slow rank", rank=evil), MEASURED).startswith(f"rank {evil} alone")
    assert words(Note.of("compute share", pct=evil), MEASURED).startswith(evil)


def test_times_of_short_steps_have_two_decimals() -> None:
    short = replace(MEASURED, stats=StarvationStats(steps=100, confidence="high", step_ms=3.0))
    assert words(Note.of("short steps", ms=3.0), short).startswith("a step of 3.00 ms")
    assert words(Note.of("short steps", ms=None), short).startswith(f"a step of {UNKNOWN} ms")
