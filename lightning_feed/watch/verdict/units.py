"""Figures as text."""

LOOP_WORDS = {"fit": "training", "validate": "validation", "test": "test", "predict": "prediction"}
"""Stage -> what its loop is called."""
SHORT_STEP_MS = 10.0
TOY_STEP_MS = 2.0
"""Steps below this are those of a first try: no setting of a loader makes them faster."""


def in_ms(value: float | None, step_ms: float) -> str:
    """Milliseconds as text, with a digit more where steps are short."""
    return "?" if value is None else f"{value:.{1 if step_ms >= SHORT_STEP_MS else 2}f}"


def plural(count: int, thing: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def toy_sentence(step_ms: float | None) -> str | None:
    """All there is to say about steps so short that Python takes most of them; None for longer ones."""
    if not step_ms or step_ms >= TOY_STEP_MS:
        return None
    return f"Steps of {step_ms:.1f} ms: Python overhead dominates; use larger batches."
