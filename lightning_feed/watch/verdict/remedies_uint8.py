"""Pictures as uint8 up to the device: whether to advise that, and the code for a batch of the form that was seen."""

from itertools import groupby

from lightning_feed.watch.verdict.diagnosis import Container, LoopFacts, Picture, Remedy
from lightning_feed.watch.verdict.remedies_images import sends_uint8

_Ways = list[tuple[Container, ...]]


def uint8_remedies(facts: LoopFacts, why: str, predicted_step_ms: float | None = None) -> list[Remedy]:
    """The remedy; none where batches hold no pictures, or hold them as uint8 already."""
    if sends_uint8(facts) or _made_on_the_device(facts):
        return []
    if facts.pictures is not None and all(picture.dtype == "uint8" for picture in facts.pictures):
        return []
    return [
        Remedy(code=uint8_line(facts), why=why, predicted_step_ms=predicted_step_ms, changes="device_transform=True")
    ]


def uint8_line(facts: LoopFacts) -> str:
    """The method that makes floats of uint8 pictures on the device, without a body for batches of unknown form.

    A FastDataModule's ``device_transform``, or Lightning's hook, which other data modules and modules have.
    """
    does = "..." if not facts.pictures else f"return {_floats('batch', _ways(facts.pictures))}"
    if facts.ours is False or (facts.ours is None and facts.pictures is not None):
        return f"def on_after_batch_transfer(self, batch, dataloader_idx): {does}"
    return f"def device_transform(self, batch, split): {does}"


def _made_on_the_device(facts: LoopFacts) -> bool:
    """Whether a FastDataModule has that method already; an ImageFolderDataModule always has one of its own."""
    return facts.device_transform is True and facts.decoder is None


def _ways(pictures: tuple[Picture, ...]) -> _Ways:
    return [picture.inside for picture in pictures]


def _floats(value: str, ways: _Ways) -> str:
    """``value`` with the pictures that lie at the end of these ways as floats, as an expression."""
    if not ways[0]:
        return f"{value}.float().div(255)"
    outer = ways[0][0]
    # The ways are in the order of the batch, so those into one part are beside each other.
    inner = {
        key: _floats(f"{value}.{key}" if outer.kind == "named tuple" else f"{value}[{key}]", [way[1:] for way in some])
        for key, some in groupby(ways, key=lambda way: way[0].key)
    }
    if outer.kind == "named tuple":
        return f"{value}._replace({', '.join(f'{key}={made}' for key, made in inner.items())})"
    if outer.kind == "dict":
        return f"{{**{value}, {', '.join(f'{key}: {made}' for key, made in inner.items())}}}"
    made = ", ".join(_elements(value, outer.parts, {int(key): one for key, one in inner.items()}))
    if outer.kind == "list":
        return f"[{made}]"
    return f"({made},)" if outer.parts == 1 else f"({made})"


def _elements(value: str, parts: int, changed: dict[int, str]) -> list[str]:
    """Those of a list or tuple: what is between the changed ones as slices."""
    said, at = [], 0
    for place, made in sorted(changed.items()):
        if place > at:
            said.append(f"*{value}[{at or ''}:{place}]")
        said.append(made)
        at = place + 1
    return said if at == parts else [*said, f"*{value}[{at}:]"]
