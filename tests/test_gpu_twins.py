"""Each test that needs a GPU names a test that shows the same without one, its twin, or says why there is none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("test_*.py") if "zoo" not in path.parts}


LEAST_WORDS = 4
"""Of the reason why a test has no twin."""


def functions(file: str) -> Iterator[ast.FunctionDef]:
    """The tests of a file, with those in classes."""
    return functions_in(ast.parse(FILES[file].read_text()).body)


def functions_in(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from functions_in(node.body)


def is_reason(text: object) -> bool:
    return len(str(text).split()) >= LEAST_WORDS


def arguments(function: ast.FunctionDef, mark: str) -> dict[str, object] | None:
    """What a mark of a test is given. None for a test without that mark."""
    for decorator in function.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(call) == f"pytest.mark.{mark}":
            given = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in given}
    return None


def on_a_gpu() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(FILES):
        for function in functions(file):
            if file.startswith("gpu/") or arguments(function, "gpu") is not None:
                yield file, function


def reason_against(twin: object) -> str | None:
    """Why a test cannot be a twin, such as "simulated/test_calls.py::test_a". None if it can."""
    file, _, name = str(twin).partition("::")
    found = [function for function in functions(file) if function.name == name] if file in FILES else []
    if not found:
        return "there is no such test"
    if arguments(found[0], "gpu") is not None:
        return "it needs a GPU itself"
    is_nightly = "pytestmark = pytest.mark.nightly" in FILES[file].read_text()
    if is_nightly or arguments(found[0], "nightly") is not None:
        return "the gate does not run its file"
    return None


def test_every_test_on_a_gpu_has_a_twin_or_a_reason() -> None:
    wrong = {}
    for file, function in on_a_gpu():
        given = arguments(function, "gpu") or {}
        if [*given] not in (["twin"], ["no_twin"]) or not is_reason(given.get("no_twin", "a twin is its reason")):
            wrong[f"{file}::{function.name}"] = "give @pytest.mark.gpu either twin= or no_twin="
        elif "twin" in given and (reason := reason_against(given["twin"])):
            wrong[f"{file}::{function.name}"] = f"{given['twin']}: {reason}"
    assert wrong == {}


def test_the_mark_is_given_to_single_tests_only() -> None:
    """One for a whole file would name one twin for all of its tests."""
    marked = {file for file, path in FILES.items() if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)}
    assert marked == {file for file, _ in on_a_gpu()}
    for file in marked:
        uses = FILES[file].read_text().count("pytest.mark.gpu")
        assert uses == sum(arguments(function, "gpu") is not None for function in functions(file)), file


def test_tests_in_classes_count_and_a_word_is_no_reason() -> None:
    source = "class TestA:\n    class TestB:\n        def test_c(self): 0\n    def helper(self): 0\ndef test_d(): 0\n"
    assert [function.name for function in functions_in(ast.parse(source).body)] == ["test_c", "test_d"]
    assert not is_reason("")
    assert not is_reason("impossible")


@pytest.mark.parametrize(
    ("twin", "reason"),
    [
        ("simulated/test_calls.py", "there is no such test"),
        ("simulated/test_calls.py::test_that_was_renamed", "there is no such test"),
        ("gpu/test_slots_on_cuda.py::test_worker_threads_collate_into_pinned_memory", "it needs a GPU itself"),
        (
            "simulated/test_mutants.py::test_every_check_passes_on_the_unchanged_code",
            "the gate does not run its file",
        ),
        ("simulated/test_calls.py::test_a_callback_alone_makes_fewer_device_calls_per_step", None),
    ],
)
def test_a_twin_is_a_test_that_the_gate_runs_without_a_gpu(twin: str, reason: str | None) -> None:
    assert reason_against(twin) == reason
