"""Whether two runs of a project trained on the same: samples, their order, and the scale of what the model is given."""

import ast
from typing import Any

from zoo.harness import Outcome, Project

OFF_CENTRE, STRETCHED = 0.25, 1.3
"""Means may be this share of the standard deviation apart, and standard deviations by this factor, where augmentation
draws other random numbers. Pictures that are normalised twice, or not at all, are further off in every project."""


def differences(project: Project, before: Outcome, after: Outcome, *, any_order: bool = False) -> list[str]:
    """What is not the same, in words; batches of the first epoch that both runs saw are compared."""
    if not after.fine:
        return ["does not run: " + after.printed[-2000:]]
    if len(before.ranks) != len(after.ranks):
        return ["other ranks"]
    found: list[str] = []
    for one, other in zip(before.ranks, after.ranks, strict=True):
        pairs = [
            (a, b) for a, b in zip(one["batches"], other["batches"], strict=False) if a["epoch"] == b["epoch"] == 0
        ]
        if not pairs:
            found.append("no batch in both")
            continue
        if not any_order and any(a["samples"] != b["samples"] for a, b in pairs):
            found.append("other samples, or another order")
        if not any_order and not project.augments and any(a["whole"] != b["whole"] for a, b in pairs):
            found.append("other values")
        found += _scales(pairs)
    return found


def not_done(remedy: Any, after: Outcome) -> list[str]:
    """What the remedy changes, where the run does not have it."""
    name, _, value = str(remedy.change).partition("=")
    return [
        f"pasted {remedy.code}, and {name} is {settings[name]}"
        for settings in (rank["settings"] for rank in after.ranks)
        if name in settings and ast.literal_eval(value) not in settings[name]
    ]


def _scales(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Where the mean over all batches of a tensor's mean or standard deviation is another."""
    found = []
    for what in ("scale", "inputs"):
        one, other = (_mean([pair[side][what] for pair in pairs]) for side in (0, 1))
        if one.keys() != other.keys():
            found.append(f"other tensors: {sorted(one)} and {sorted(other)}")
        for name in one.keys() & other.keys():
            (mean, std), (mean_after, std_after) = one[name], other[name]
            ratio = (std_after + 1e-6) / (std + 1e-6)
            if abs(mean_after - mean) > OFF_CENTRE * std + 1e-3 or not 1 / STRETCHED < ratio < STRETCHED:
                found.append(f"another scale of {what} {name}: {one[name]} and {other[name]}")
    return found


def _mean(batches: list[Any]) -> dict[str, tuple[float, float]]:
    """Of each tensor, by its place."""
    sums: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        parts = batch.items() if isinstance(batch, dict) else [("batch", batch)]
        for name, tensors in parts:
            for number, pair in enumerate(tensors):
                sums.setdefault(f"{name}[{number}]", []).append(pair)
    return {
        name: (sum(mean for mean, _ in pairs) / len(pairs), sum(std for _, std in pairs) / len(pairs))
        for name, pairs in sums.items()
    }
