"""Remedies that make the samples of an ImageFolderDataModule with less work, as far as ``diagnose`` has tried them."""

import json
import shlex

from lightning_feed.measure.experiment_results import LighterSample, PackedImages, pack_options
from lightning_feed.measure.measurements import Measurements
from lightning_feed.verdict.diagnosis import Remedy
from lightning_feed.wording import size_text

TRIES_LIGHTER_SAMPLES = "tries ways with less work for each sample"
"""Words for the experiments of ``diagnose`` with an ImageFolderDataModule."""


def may_try_lighter_samples(measured: Measurements) -> bool:
    """True for a fit whose workers decode the images of an ImageFolderDataModule, and that was not diagnosed yet."""
    facts = measured.facts
    decodes = facts.datamodule.quality is not None and facts.datamodule.backend == "torch"
    return decodes and facts.loop == "trainer" and facts.stage == "fit" and not measured.diagnosed


def lighter_sample_remedy(trial: LighterSample, measured: Measurements) -> Remedy:
    """The remedy that makes a change that was tried. The caller adds the bound of the step time."""
    name = measured.facts.loader_code.datamodule if measured.facts.loader_code is not None else ""
    call = f"in the call that makes your {name or 'ImageFolderDataModule'}"
    costs = f"{trial.then_ms:.2f} ms of CPU for a sample instead of {trial.now_ms:.2f}"
    pack = trial.pack
    if pack is not None:
        options = pack_options(pack.short_side_px, decoded=pack.decoded)
        return Remedy(
            code=f"lightning-feed pack {shlex.quote(pack.root)} {shlex.quote(pack.path)}{options}",
            form="command",
            where=f"root: {pack.root} -> {pack.path} {call}, after this command",
            why=f"{costs}; {_stored_as(pack)}",
            changes=f"root={pack.path}",
        )
    value = trial.value
    effect = _EFFECTS.get(trial.setting, "")
    if trial.setting == "decoder":  # which refuses a decoder whose pixels differ
        value = "auto"
        effect = f"this takes the fastest accurate one, here {trial.value}"
    present = vars(measured.facts.datamodule).get(trial.setting)
    return Remedy(
        code=f"{trial.setting}={json.dumps(value)}",
        form="datamodule",
        where=f"{trial.setting}: {present or 'not set'} -> {value} {call}",
        why=f"{costs}; {effect}" if effect else costs,
        changes=f"{trial.setting}={value}",
    )


_EFFECTS = {
    "backend": "the GPU decodes",
    "quality": "images are resized without antialiasing",
}
"""Setting -> what its new value does."""


def name_of_change(trial: LighterSample) -> str:
    """Name of a change that was tried, as typed: ``quality="fast"``, ``pack --decoded``."""
    if trial.pack is not None:
        return f"pack{pack_options(trial.pack.short_side_px, decoded=trial.pack.decoded)}"
    return f"{trial.setting}={json.dumps(trial.value)}"


def _stored_as(pack: PackedImages) -> str:
    """Words for the content and the size of a pack, and for the effect of smaller images."""
    holds = "pixels are" if pack.decoded else "images are"
    text = f"{holds} stored in {size_text(pack.pack_bytes)} beside the {size_text(pack.folder_bytes)} of files"
    if pack.short_side_px is not None:
        text += f", {pack.short_side_px} pixels on the shorter side, so crops of small regions are less sharp"
    return text
