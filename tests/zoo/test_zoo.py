"""What holds in every project of the zoo: no run changes, its report is made, and what it says can be done."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from zoo.apply import CannotApply, apply
from zoo.compare import differences, not_done
from zoo.harness import Outcome, Project, copy_of, projects, run
from zoo.printable import every_remedy

from lightning_feed.verdict.diagnosis import Remedy

STEPS = 40
FEWER_STEPS = 20
"""Of a run with a remedy."""
ZOO = projects()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@cache
def trained(name: str, folder: Path) -> tuple[Outcome, Outcome]:
    """A project's run without the callbacks, and the same with them."""
    where = copy_of(ZOO[name], folder / name)
    plain, fed = (run(ZOO[name], where, feed=feed, steps=STEPS) for feed in (False, True))
    return plain, fed


IN_THE_GATE = {"cli_yaml", "timm_birds"}
"""Projects of two kinds; the others are run with ``-m nightly``."""


STARTS_ANEW = {"ddp", "notebook"}
"""Projects that start a Python of their own for each run, which takes longer than the run: a rank, a kernel. With them
only the first way to set the loader is tried, together with all other remedies; the others are tried with the rest."""


def _row(name: str, project: Project) -> Any:
    # One process for all tests of a project, which then trains once for all of them.
    marks = [pytest.mark.xdist_group(name)]
    if name not in IN_THE_GATE:
        marks.append(pytest.mark.nightly)
    return pytest.param(project, id=name, marks=marks)


rows = pytest.mark.parametrize("project", [_row(name, project) for name, project in ZOO.items()])
pytestmark = pytest.mark.slow


def test_zoo_lists_every_project_folder_and_at_least_twelve() -> None:
    assert len(ZOO) >= 12
    assert {path.name for path in Path(__file__).with_name("projects").iterdir()} == set(ZOO)


@rows
def test_weights_and_batches_are_bit_identical_with_the_callbacks(project: Project, folder: Path) -> None:
    plain, fed = trained(project.name, folder)
    assert plain.fine, plain.printed[-3000:]
    assert differences(project, plain, fed) == []
    assert len(fed.ranks) == project.ranks
    for plain_rank, fed_rank in zip(plain.ranks, fed.ranks, strict=True):
        assert plain_rank["batches"] == fed_rank["batches"]
        assert plain_rank["weights"] == fed_rank["weights"] != ""


@rows
def test_a_short_run_is_reported_without_an_error(project: Project, folder: Path) -> None:
    fed = trained(project.name, folder)[1]
    assert fed.ranks[0]["report"]["step_ms"] > 0
    assert "FEED  " in fed.printed
    failures = ("Traceback (most", "stopped measuring", "GPUStarvationCallback could not", "PrefetchCallback could not")
    assert [words for words in failures if words in fed.printed] == []


@rows
def test_every_remedy_can_be_applied_as_printed(project: Project, folder: Path) -> None:
    plain, fed = trained(project.name, folder)
    remedies = every_remedy(fed.measured.facts)
    assert remedies, "slow runs of this project are given no advice"
    wrong = {}
    combinations = _compatible(remedies)
    for together in combinations[:1] if project.name in STARTS_ANEW else combinations:
        where = copy_of(project, Path(mkdtemp(dir=folder)) / project.name)
        said = tuple((remedy.code, remedy.where) for remedy in together)
        try:
            overrides = [override for remedy in together for override in apply(remedy, where, project.program)]
        except CannotApply as reason:
            wrong[said] = [str(reason)]
            continue
        after = run(project, where, feed=False, steps=FEWER_STEPS, overrides=overrides)
        reordered = any("in_order=False" in code or (project.reshuffles and "num_workers" in code) for code, _ in said)
        reasons = differences(project, plain, after, any_order=reordered)
        reasons += [reason for remedy in together for reason in not_done(remedy, after)]
        if reasons:
            wrong[said] = reasons
    assert wrong == {}


def _compatible(remedies: list[Remedy]) -> list[list[Remedy]]:
    """Each way to set the loader by itself, since they exclude each other, and all other remedies with the first."""
    ways = ("workers", "in_order", "wrap(")
    of_loaders = [remedy for remedy in remedies if any(way in remedy.code for way in ways)]
    others = [remedy for remedy in remedies if remedy not in of_loaders]
    return [[*of_loaders[:1], *others], *([remedy] for remedy in of_loaders[1:])]
