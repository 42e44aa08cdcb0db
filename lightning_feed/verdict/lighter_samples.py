"""Remedies that make the samples of an ImageFolderDataModule with less work, as far as ``diagnose`` has tried them."""

import json
import shlex

from lightning_feed.measure.experiment_results import LighterSample, PackedImages, pack_options
from lightning_feed.measure.measurements import Measurements
from lightning_feed.verdict.diagnosis import Change, Note, NoteKind, Remedy


def may_try_lighter_samples(measured: Measurements) -> bool:
    """Return True for a fit whose workers decode the images of an ImageFolderDataModule, and that was not diagnosed
    yet."""
    facts = measured.facts
    decodes = facts.datamodule.quality is not None and facts.datamodule.backend == "torch"
    return decodes and facts.loop == "trainer" and facts.stage == "fit" and not measured.diagnosed


def lighter_sample_remedy(trial: LighterSample, measured: Measurements) -> Remedy:
    """Return the remedy that makes a change that was tried. The caller adds the bound of the step time."""
    name = measured.facts.loader_code.datamodule if measured.facts.loader_code is not None else ""
    call = f"in the call that makes your {name or 'ImageFolderDataModule'}"
    pack = trial.pack
    if pack is not None:
        options = pack_options(pack.short_side_px, decoded=pack.decoded)
        return Remedy(
            code=f"lightning-feed pack {shlex.quote(pack.root)} {shlex.quote(pack.path)}{options}",
            form="command",
            where=f"root: {pack.root} -> {pack.path} {call}, after this command",
            why=(Note.of("less CPU", then_ms=trial.then_ms, now_ms=trial.now_ms), _stored(pack)),
            change=Change("root", pack.path),
        )
    value = "auto" if trial.setting == "decoder" else trial.value  # which refuses a decoder whose pixels differ
    why = Note.of("less CPU", then_ms=trial.then_ms, now_ms=trial.now_ms)
    effects = [Note.of(_HOW[trial.setting], decoder=trial.value)] if trial.setting in _HOW else []
    present = vars(measured.facts.datamodule).get(trial.setting)
    return Remedy(
        code=f"{trial.setting}={json.dumps(value)}",
        form="datamodule",
        where=f"{trial.setting}: {present or 'not set'} -> {value} {call}",
        why=(why, *effects),
        change=Change(trial.setting, value),
    )


_HOW: dict[str, NoteKind] = {"decoder": "fastest decoder", "backend": "GPU decodes", "quality": "no antialiasing"}
"""Setting -> what its new value does."""


def name_of_change(trial: LighterSample) -> str:
    """Name of a change that was tried, as typed: ``quality="fast"``, ``pack --decoded``."""
    if trial.pack is not None:
        return f"pack{pack_options(trial.pack.short_side_px, decoded=trial.pack.decoded)}"
    return f"{trial.setting}={json.dumps(trial.value)}"


def _stored(pack: PackedImages) -> Note:
    """Return the note on the size of a pack, and on the size of its images if they are smaller."""
    kind: NoteKind = "pixels stored" if pack.decoded else "images stored"
    return Note.of(kind, pack_bytes=pack.pack_bytes, folder_bytes=pack.folder_bytes, short_side_px=pack.short_side_px)
