"""What a diagnosis prints."""

from lightning_feed.watch.reports.road import read_road, road_text
from lightning_feed.watch.reports.text import as_text
from lightning_feed.watch.verdict.diagnosis import Diagnosis


def whole_text(diagnosis: Diagnosis) -> str:
    """The report with the road from disk to model, also where there is no verdict because nothing was trained."""
    text = as_text(diagnosis)
    road = read_road(diagnosis)
    if road is None or road_text(road) in text:
        return text
    found = diagnosis.measurements.experiments
    left_out = [f"skip  {name}: {why}" for name, why in (found.left_out if found is not None else ())]
    return "\n".join([text, "", road_text(road), *left_out])
