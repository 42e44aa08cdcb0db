"""The drawings of the documentation, as SVG files in docs/images. Lengths are schematic, not measured.

Run it after a change: python docs/make_drawings.py
"""

import math
from html import escape
from pathlib import Path

INK, GREY, LINE = "#24292f", "#8c8980", "#d0d7de"
COMPUTE, DATA, COPY, HOST = "#2878d8", "#d9483b", "#e0992b", "#dfe3e8"
LABELS, LEFT = 150, 20


def text(x: float, y: float, words: str, *, size: int = 14, colour: str = INK, anchor: str = "start") -> str:
    """Words, whose baseline begins, or with ``anchor="middle"`` has its middle, at a point."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def line(start: tuple[float, float], end: tuple[float, float], *, colour: str = GREY, dashed: bool = False) -> str:
    """A line."""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.5"{dash}/>'


def arrow(start: tuple[float, float], end: tuple[float, float], *, colour: str = INK) -> str:
    """An arrow from one point to another."""
    angle = math.atan2(end[1] - start[1], end[0] - start[0])
    wings = [(end[0] - 8 * math.cos(angle + turn), end[1] - 8 * math.sin(angle + turn)) for turn in (-0.45, 0.45)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (end, *wings))
    return line(start, end, colour=colour) + f'<polygon points="{points}" fill="{colour}"/>'


def lane(y: float, name: str, *boxes: tuple[float, float, str, str]) -> str:
    """A row in time: its name, and (from, to, words, colour) of what happens there."""
    drawn = [text(LEFT, y + 25, name), line((LABELS, y + 20), (880, y + 20), colour=LINE)]
    for begin, end, words, colour in boxes:
        dark = colour in (COMPUTE, DATA)
        drawn.append(
            f'<rect x="{LABELS + begin:g}" y="{y:g}" width="{end - begin:g}" height="40" rx="4" fill="{colour}"/>'
            + text(LABELS + (begin + end) / 2, y + 25, words, colour="#fff" if dark else INK, anchor="middle", size=13)
        )
    return "".join(drawn)


def drawing(height: int, title: str, *parts: str) -> str:
    """A whole file, on white, so that it can be read on a dark page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" font-family="system-ui, sans-serif" '
        f'role="img"><title>{escape(title)}</title><rect width="900" height="{height}" rx="8" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def streams() -> str:
    """One step: the host's marks, and when the compute stream reaches them."""
    host, device = 60, 170
    reached = {"E0": (60, 190), "E1": (330, 330), "E2": (370, 420), "E3": (500, 700)}
    marks = []
    for name, (at, then) in reached.items():
        marks.append(text(LABELS + at, host - 12, name, anchor="middle"))
        marks.append(arrow((LABELS + at, host + 40), (LABELS + then, device - 2)))
    data, hidden = "data: nothing to do", "not counted: still computing"
    return drawing(
        290,
        "The marks of a step on the host, and the times at which the compute stream reaches them",
        lane(
            host,
            "host",
            (60, 330, "waits in next(loader)", HOST),
            (330, 370, "copy", COPY),
            (370, 500, "queues the step", HOST),
        ),
        lane(
            device,
            "compute stream",
            (0, 190, "step before", COMPUTE),
            (190, 330, data, DATA),
            (330, 420, "copy", COPY),
            (420, 700, "compute", COMPUTE),
        ),
        *marks,
        text(LABELS + 60, device + 66, hidden, colour=GREY, size=13),
        line((LABELS + 60, device + 46), (LABELS + 190, device + 46)),
        text(LABELS, device + 100, "time →", colour=GREY, size=13),
    )


def look_ahead() -> str:
    """Steps without and with PrefetchCallback."""
    without, ahead = 70, 230
    waits = [(0, 150, "step 1", COMPUTE), (150, 230, "copy 2", COPY), (230, 380, "step 2", COMPUTE)]
    waits += [(380, 460, "copy 3", COPY), (460, 610, "step 3", COMPUTE)]
    copies = [(30, 110, "copy 2", COPY), (180, 260, "copy 3", COPY), (330, 410, "copy 4", COPY)]
    steps = [(150 * number, 150 * number + 150, f"step {number + 1}", COMPUTE) for number in range(3)]
    hand_over = [
        arrow((LABELS + end, ahead + 100), (LABELS + 150 * number, ahead + 124))
        for number, (_, end, _, _) in enumerate(copies, start=1)
    ]
    return drawing(
        430,
        "Without PrefetchCallback copies and steps take turns; with it the next copy runs beside the step",
        text(LEFT, 40, "Without: copies and steps take turns on one stream"),
        lane(without, "compute stream", *waits),
        text(LEFT, ahead - 30, "With PrefetchCallback: the next batch is copied on a stream of its own"),
        lane(
            ahead,
            "host",
            *((150 * n + 10, 150 * n + 140, f"fetch {n + 2}, copy", HOST) for n in range(3)),
        ),
        lane(ahead + 60, "side stream", *copies),
        lane(ahead + 126, "compute stream", *steps),
        *hand_over,
        text(LABELS + 470, ahead + 84, "→ waits for the copy's event,", colour=GREY, size=13),
        text(LABELS + 485, ahead + 100, "on the device and not on the host", colour=GREY, size=13),
        text(LABELS, ahead + 186, "time →", colour=GREY, size=13),
    )


def ring() -> str:
    """The ring of events: marks that wait for the device, and free ones."""
    centre, radius, slots = (250.0, 200.0), 130.0, 24
    drawn = []
    for slot in range(slots):
        angle = 2 * math.pi * slot / slots - math.pi / 2
        x, y = centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)
        colour = COMPUTE if 3 <= slot < 7 else COPY if 7 <= slot < 15 else "#fff"
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="13" fill="{colour}" stroke="{GREY}" stroke-width="1.5"/>')
    legend = (
        ("passed, to be read", COMPUTE, "All marks of a finished step: reading does not wait."),
        ("recorded", COPY, "The device has not come to them: the host is ahead."),
        ("free", "#fff", "Used again in turn: nothing is allocated in a step."),
    )
    rows = []
    for number, (name, colour, meaning) in enumerate(legend):
        y = 120 + 70 * number
        rows.append(f'<circle cx="480" cy="{y - 5}" r="10" fill="{colour}" stroke="{GREY}" stroke-width="1.5"/>')
        rows.append(text(500, y, name) + text(500, y + 22, meaning, size=12, colour=GREY))
    return drawing(
        400,
        "The ring of events: recorded marks are read once the device has passed them",
        *drawn,
        text(centre[0], centre[1] - 4, "1,024 events", anchor="middle"),
        text(centre[0], centre[1] + 18, "made once", anchor="middle", size=12, colour=GREY),
        *rows,
        text(480, 345, "Ring full: the step is not measured. The host never waits.", size=13),
    )


def road() -> str:
    """The road of a batch from a worker to the device: torch's, and through a slot."""
    theirs, ours = 40, 330

    def box(x: float, y: float, words: str, colour: str = HOST, below: str = "") -> str:
        dark = colour in (COMPUTE, DATA)
        return (
            f'<rect x="{x:g}" y="{y:g}" width="150" height="54" rx="6" fill="{colour}"/>'
            + text(x + 75, y + 32, words, colour="#fff" if dark else INK, anchor="middle", size=13)
            + text(x + 75, y + 72, below, colour=GREY, anchor="middle", size=12)
        )

    def step(y: float, place: int, words: str) -> str:
        """An arrow between two boxes, and what it takes."""
        left = 180 + 220 * place
        return arrow((left, y + 27), (left + 62, y + 27)) + text(left + 31, y + 16, words, anchor="middle", size=12)

    return drawing(
        600,
        "The road of a batch: torch puts it into new shared memory, then into pinned memory; a slot is filled once",
        text(206, theirs - 12, "worker process", anchor="middle", colour=GREY),
        text(537, theirs - 12, "training process", anchor="middle", colour=GREY),
        text(LEFT, theirs + 22, "torch"),
        box(20, theirs + 40, "samples"),
        step(theirs + 40, 0, "stack"),
        box(242, theirs + 40, "new shared memory", DATA, "the kernel clears each page"),
        step(theirs + 40, 1, "descriptor"),
        box(462, theirs + 40, "mapped again", DATA, "page faults once more"),
        arrow((537, theirs + 132), (537, theirs + 166)),
        text(548, theirs + 154, "a thread copies it, and holds the GIL", size=12),
        box(462, theirs + 170, "pinned memory", COPY, "of torch's allocator"),
        step(theirs + 170, 2, "copy"),
        box(682, theirs + 170, "device", COMPUTE),
        line((LEFT, ours - 14), (880, ours - 14), colour=LINE),
        text(LEFT, ours + 22, "slots"),
        box(20, ours + 40, "samples"),
        step(ours + 40, 0, "stack"),
        box(242, ours + 40, "slot", COPY, "there before the worker"),
        step(ours + 40, 1, "number"),
        box(462, ours + 40, "the same slot", COPY, "looked at in place"),
        step(ours + 40, 2, "copy"),
        box(682, ours + 40, "device", COMPUTE),
        arrow((537, ours + 132), (537, ours + 166)),
        text(548, ours + 146, "once nothing refers to the batch,", size=12),
        text(548, ours + 162, "and the device has passed its copy", size=12),
        box(462, ours + 170, "free", below="taken by the next batch"),
        line((462, ours + 197), (317, ours + 197), colour=INK),
        arrow((317, ours + 197), (317, ours + 118)),
    )


DRAWINGS = {"streams": streams, "look-ahead": look_ahead, "ring": ring, "road": road}


if __name__ == "__main__":
    images = Path(__file__).with_name("images")
    for name, draw in DRAWINGS.items():
        (images / f"{name}.svg").write_text(draw(), encoding="utf-8")
