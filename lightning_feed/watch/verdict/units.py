"""Figures as text."""

SHORT_STEP_MS = 10.0


def in_ms(value: float | None, step_ms: float) -> str:
    """Milliseconds as text, with a digit more where steps are short."""
    return "?" if value is None else f"{value:.{1 if step_ms >= SHORT_STEP_MS else 2}f}"
