"""A pipeline's graph, from its outputs back to its readers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any


def operators(nodes: Sequence[Any]) -> Iterator[Any]:
    """Each operator that ``nodes`` depend on, once.

    Args:
        nodes: of DALI's graph, as ``nvidia.dali.fn`` returns them.
    """
    seen: set[int] = set()
    waiting = [node.source for node in nodes]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [node.source for node in one.inputs or ()]


def given_arguments(one: Any) -> Mapping[str, Any]:
    """The arguments of an operator as the user gave them; empty where DALI does not keep them.

    The public ``spec`` has them converted: 1.5 is 1 there. Read in DALI 2.4.0 (``ops/__init__.py: python_op_factory``).
    """
    arguments = getattr(getattr(one, "_op", None), "_init_args", None)
    return arguments if isinstance(arguments, Mapping) else {}


def read_images(nodes: Sequence[Any], readers: Collection[str]) -> list[Any]:
    """The nodes that go from a reader straight to a decoder of images, or to what reads their headers.

    Args:
        nodes: the outputs of the pipeline.
        readers: names.
    """
    encoded = [one.inputs[0] for one in operators(nodes) if one.inputs and _takes_images(one)]
    of_readers = {id(node): node for node in encoded if node.source is not None and node.source.name in readers}
    return list(of_readers.values())


def _takes_images(one: Any) -> bool:
    # "OpSpec for decoders__ImageRandomCrop:", "OpSpec for experimental__PeekImageShape:" (read in DALI 2.4.0)
    kind = str(one.spec).partition(":")[0].removeprefix("OpSpec for ").rpartition("__")[2]
    return kind == "PeekImageShape" or kind.startswith("Image")
