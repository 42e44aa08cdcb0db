"""Labels that DALI would change in silence, and what DALI refuses of a pipeline, with what to do."""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_feed.errors import DatasetError
from lightning_feed.load.dali.image_decoder import reason_of
from lightning_feed.load.dali.install import require_dali
from lightning_feed.load.dali.reader_graph import given_arguments, operators
from lightning_feed.load.dali.reader_share import too_few

_MOST = 2**31
"""DALI's labels are int32: from here on they come out as other numbers (seen in 2.4.0)."""
_NUMBERED = "Number the classes: labels is a list of int below 2**31, one for each file."
_LISTED = "Each line is the path of a file, a blank, and the number of its class, 0 or more: cats/1.jpg 0"
_LONG_LABEL = re.compile(r"^.*\s(\d{10,})\s*$", re.MULTILINE)
_SHOWN = 1500
"""Characters of DALI's reason that go into ours: all of it, in what was seen."""
# Parts of DALI's messages, as seen in 2.4.0.
_OPERATOR = re.compile(r"Error in \w+ operator `(?:nvidia\.dali\.)?([^`]+)`")
_CALLED = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_BEFORE = re.compile(r'^(?:Critical error [a-z ]+: )*(?:Assert on ".+?" failed: )?')
_BEHIND = re.compile(r" (?:C\+\+ context: \[|Stacktrace ).*$")
_TOO_FEW = re.compile(r"number of input samples: (\d+), needs to be at least equal to the requested number of shards")
_SAME_NAME = re.compile(r"operators with non-unique names:\s*\{('[^']*'): ")


@contextmanager
def dali_explained(name: str) -> Iterator[None]:
    """While a pipeline is defined: what DALI refuses is raised as a DatasetError. What others raise passes.

    Args:
        name: of the pipeline function and the split.

    Raises:
        DatasetError: from DALI's error: where in the user's code, what was wrong, and of labels what to do.
    """
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        inside = _frames_of_dali(error.__traceback__)
        if not inside:
            raise
        called = [frame for frame in traceback.extract_tb(error.__traceback__) if not _of_dali(frame.filename)]
        where = f"{name}, called at {Path(called[-1].filename).name}, line {called[-1].lineno}" if called else name
        wrong = next((_first_wrong(*labels) for labels in map(_labels_in, inside) if labels is not None), None)
        if wrong is None:
            said = str(error.args[0]) if error.args else repr(error)  # str() of a KeyError is in quotes
            wrong = f"DALI said: {said}"
            if "`labels`" in said:
                wrong += f"\n{_NUMBERED} Of an array or a tensor, give labels.tolist()."
        raise DatasetError(f"{where}: {wrong}") from error


def refuse_changed_labels(nodes: Sequence[Any], name: str) -> None:
    """Refuse labels of which DALI would make others: 1.5 becomes 1, and 2**31 becomes -2**31.

    Args:
        nodes: the outputs of the pipeline.
        name: of the pipeline function and the split.

    Raises:
        DatasetError: names the label, and where it was given.
    """
    for one in operators(nodes):
        given = given_arguments(one)
        wrong = None
        if given.get("labels") is not None:
            wrong = _first_wrong(given["labels"], given.get("files"))
        elif given.get("file_list") is not None:
            wrong = _first_wrong_listed(Path(given["file_list"]))
        if wrong is not None:
            raise DatasetError(f"{name}: {wrong}")


def not_built(error: Exception, name: str, ranks: int, *, on_cpu: bool) -> str:
    """What is said of a pipeline that DALI refuses to build, with what to do.

    Args:
        error: DALI's.
        name: of the pipeline function and the split.
        ranks: that the set is divided among.
        on_cpu: whether the pipeline is to work on the CPU alone.
    """
    text = str(error)
    few, same = _TOO_FEW.search(text), _SAME_NAME.search(text)
    if few is not None and 0 < int(few[1]) < ranks:
        return too_few(int(few[1]), ranks, name)
    if same is not None:
        return (
            f"{name} has several operators of the name {same[1]}, and each has to have its own. A second reader takes "
            'another name, as in **self.reader("masks").'
        )
    return f"DALI cannot build what {name} makes. {said_by_dali(error)}{_advice(text, on_cpu=on_cpu)}"


def said_by_dali(error: Exception) -> str:
    """The reason in DALI's message, of which operator, and where that was called: the last place that DALI lists."""
    text, reason = str(error), _BEHIND.sub("", _BEFORE.sub("", reason_of(error)))[:_SHOWN]
    operator, called = _OPERATOR.search(text), _CALLED.findall(text.partition("encountered:")[0])
    if operator is None:
        return f"DALI said: {reason}"
    where = f", called at {Path(called[-1][0]).name}, line {called[-1][1]}" if called else ""
    return f"DALI said of {operator[1]}{where}: {reason}"


def _advice(said: str, *, on_cpu: bool) -> str:
    if "checkpointing" in said.lower():
        return "\nFor operators without a state that can be saved, give DaliDataModule(resumable=False)."
    if on_cpu and "requires a CUDA-capable GPU" in said:
        return (
            "\nThe pipeline is to work on the CPU, as device= or the Trainer says: give decoders "
            "device=self.decoder_device, which follows it, and no other operator device='gpu' or .gpu()."
        )
    if any(nothing in said for nothing in ("Failed to open", "No files found", "number of input samples: 0,")):
        return "\nWhere there is no such split, return None."
    return f"\n{_LISTED}. There is no header." if "format of the list file" in said else ""


def _first_wrong(labels: Any, files: Any) -> str | None:
    if hasattr(labels, "tolist"):
        return None  # DALI takes no array at all
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        labels = [labels]
    if all(type(label) is int for label in labels) and (not labels or -_MOST <= min(labels) <= max(labels) < _MOST):
        return None  # a million of them take 50 ms
    for place, label in enumerate(labels):
        why = _why_wrong(label)
        if why:
            known = isinstance(files, Sequence) and not isinstance(files, str) and place < len(files)
            return f"labels[{place}]={label!r}{f', of {files[place]},' if known else ''} {why}. {_NUMBERED}"
    return None


def _why_wrong(label: Any) -> str:
    try:
        number = int(label)
    except (TypeError, ValueError, OverflowError):
        return "is no number"
    if not isinstance(label, str) and number != label:
        return f"is no whole number, and DALI would make {number} of it"
    return "" if -_MOST <= number < _MOST else "is too large for DALI's labels, which have 32 bits"


def _first_wrong_listed(file_list: Path) -> str | None:
    if not file_list.is_file():
        return None  # DALI says so
    text = file_list.read_text(errors="replace")
    for found in _LONG_LABEL.finditer(text):
        if int(found[1]) >= _MOST:
            line = text.count("\n", 0, found.start()) + 1
            return f"{file_list}, line {line}: the label {found[1]} is too large, DALI's have 32 bits. {_LISTED}."
    return None


def _labels_in(frame: Any) -> tuple[Any, Any] | None:
    """``labels`` and ``files``, as they were given to the operator that could not be made."""
    given = frame.f_locals.get("kwargs")
    if isinstance(given, Mapping) and given.get("labels") is not None:
        return given["labels"], given.get("files")
    return None


def _frames_of_dali(trace: TracebackType | None) -> list[Any]:
    """The frames inside of DALI that an error went through, if one of them raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    if not frames or not _of_dali(frames[-1].f_code.co_filename):
        return []
    return [frame for frame in frames if _of_dali(frame.f_code.co_filename)]


def _of_dali(filename: str) -> bool:
    return Path(require_dali(gpu=False).__file__).parent in Path(filename).parents
