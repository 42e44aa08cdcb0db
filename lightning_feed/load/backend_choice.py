"""``backend="auto"``: which backend decodes images, of what was measured. A pure function."""

from dataclasses import dataclass, field

from lightning_feed.load.image_findings import ImageFinding

HEADROOM_PCT = 20.0
"""Share of step time without work that a GPU has to have before decoding is given to it; from there on, too, a step
counts as highly data-bound."""
MOVABLE_PCT = 50.0
"""Share of the workers' time for a sample that has to leave them. Reading stays."""
FASTER = 1.05
"""A backend is taken in place of torch when it is so many times as fast."""
NOT_MEASURED = "nothing is measured yet on this folder, size and device: run lightning-feed diagnose"


@dataclass(frozen=True)
class BackendChoice:
    """A backend and why it is this one."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """What the choice rests on."""

    device_type: str
    """Where training runs."""
    no_nvjpeg: str = ""
    """Why nvJPEG cannot be used here; "" where it can."""
    no_dali: str = ""
    """The same of DALI."""
    transforms: bool = False
    """Whether the user gave a transform."""
    cache: str | None = None
    quality: str = "exact"
    """That was asked for."""
    pixels: bool = False
    """Whether the images are pixels already."""
    findings: tuple[ImageFinding, ...] = field(default=())
    """What was measured on this machine, device and folder."""

    def why_not(self, backend: str) -> str:
        """Why a backend cannot be used; "" where it can."""
        if backend in ("nvjpeg", "dali-gpu") and self.device_type != "cuda":
            return f"training is on {self.device_type}"
        if backend in ("dali-cpu", "dali-gpu") and self.quality != "exact":
            return f"DALI decodes all pixels, so that quality={self.quality!r} would have no effect"
        return {"nvjpeg": self.no_nvjpeg, "torch": ""}.get(backend, self.no_dali)


def choose_backend(facts: BackendFacts) -> BackendChoice:
    """The backend to use, with the figures that say so.

    What was measured on several backends decides first. Else it is torch, unless torch was measured to be decode-bound
    with all CPUs at work, and a GPU has the time to decode: then DALI where it is installed, else nvJPEG.
    """
    for case, why in (
        (facts.transforms, "a transform was given, which is called for each image in the workers"),
        (facts.cache in ("decoded", "device"), f"cache={facts.cache!r} keeps decoded images"),
        (facts.pixels, "the pack holds pixels: there is nothing to decode"),
    ):
        if case:
            return BackendChoice("torch", why)
    torch_found = _found(facts, "torch")
    best = _fastest(facts, torch_found)
    if best is not None:
        return best
    if torch_found is None:
        others = sorted({one.backend for one in facts.findings})
        if others:
            said = f"only {', '.join(map(repr, others))} was measured on this folder: run lightning-feed diagnose with "
            return BackendChoice("torch", said + 'backend="torch", to compare')
        return BackendChoice("torch", NOT_MEASURED)
    return _by_headroom(facts, torch_found)


def _by_headroom(facts: BackendFacts, found: ImageFinding) -> BackendChoice:
    """Of what was measured with torch alone."""
    figures = _figures(found)
    if facts.device_type != "cuda":
        return BackendChoice("torch", f"training is on {facts.device_type}, and no GPU could decode; {figures}")
    if not found.cpu_bound:
        return BackendChoice("torch", f"it is not the CPUs of the workers that training waits for: {figures}")
    workers, cpus = found.num_workers, found.usable_cpus
    if workers is not None and cpus is not None and workers < cpus:
        said = f"decode-bound with {workers} workers on {cpus} CPUs, so more workers come first: {figures}"
        return BackendChoice("torch", said)
    if found.movable_pct is not None and found.movable_pct < MOVABLE_PCT:
        said = f"reading takes {100 - found.movable_pct:.0f} % of the workers' time, and stays with them: {figures}"
        return BackendChoice("torch", said)
    if found.starved_pct < HEADROOM_PCT:
        said = f"decode-bound, but the GPU has only {found.starved_pct:.0f} % of its time to decode in: {figures}"
        return BackendChoice("torch", said)
    reasons: list[str] = []
    for backend in ("dali-gpu", "nvjpeg"):
        why = facts.why_not(backend) or _too_slow(facts, backend, found)
        if not why:
            others = "".join(f"; not {reason}" for reason in reasons)
            return BackendChoice(backend, f"decode-bound, and the GPU has time to decode in: {figures}{others}")
        reasons.append(f'"{backend}": {why}')
    said = f"decode-bound, and the GPU has time to decode in: {figures}; but not {'; not '.join(reasons)}"
    return BackendChoice("torch", said)


def _fastest(facts: BackendFacts, torch_found: ImageFinding | None) -> BackendChoice | None:
    """The backend that trained fastest, where it is another than torch."""
    now = None if torch_found is None else _rate(torch_found)
    if torch_found is None or now is None:
        return None
    rates = [
        (one.samples_per_s, one.backend)
        for one in facts.findings
        if one.samples_per_s is not None and one.backend != "torch" and one.batch_size == torch_found.batch_size
        if not facts.why_not(one.backend)
    ]
    rate, backend = max(rates, default=(0.0, ""))
    if rate < FASTER * now:
        return None
    said = f"training took {rate:,.0f} images/s with it, and {now:,.0f} with torch (lightning-feed diagnose)"
    return BackendChoice(backend, said)


def _too_slow(facts: BackendFacts, backend: str, found: ImageFinding) -> str:
    """Why a backend is not expected to be faster than torch was; "" where it is, or nothing is known of it."""
    now, size = _rate(found), found.batch_size
    measured = [one.samples_per_s for one in facts.findings if (one.backend, one.batch_size) == (backend, size)]
    rate = next((rate for rate in measured if rate is not None), None)
    if rate is not None and now is not None:  # were it faster, it would have been taken before
        return f"training took {rate:,.0f} images/s with it"
    alone = found.device_samples_per_s
    if backend != "nvjpeg" or alone is None or now is None:
        return ""
    # In turns, as where both need all of the GPU. Where a decoder of its own in the GPU does it, it is less.
    together = 1 / (1 / alone + (100 - found.starved_pct) / 100 / now)
    if together >= FASTER * now:
        return ""
    return f"the GPU alone decodes {alone:,.0f} images/s, which with training makes {together:,.0f}"


def _rate(found: ImageFinding) -> float | None:
    """Images per second of training; those of the loader, which training does not exceed, where that is not known."""
    return found.samples_per_s if found.samples_per_s is not None else found.loader_samples_per_s


def _found(facts: BackendFacts, backend: str) -> ImageFinding | None:
    """That of ``diagnose``, which measures training itself, before that of ``tune``."""
    found = {one.by: one for one in facts.findings if one.backend == backend}
    return found.get("diagnose") or found.get("tune")


def _figures(found: ImageFinding) -> str:
    """What was measured, as a phrase."""
    told = []
    if found.samples_per_s is not None:
        told.append(f"training takes {found.samples_per_s:,.0f} images/s")
    if found.loader_samples_per_s is not None:
        told.append(f"the loader alone gives {found.loader_samples_per_s:,.0f} images/s")
    if found.model_samples_per_s is not None:
        told.append(f"the model could take {found.model_samples_per_s:,.0f}")
    told.append(f"it waits {found.starved_pct:.0f} % of its time")
    return f"{', '.join(told)} (lightning-feed {found.by}, {found.day})"
