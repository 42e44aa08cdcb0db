"""Does what a remedy says to a copy of a project, literally: no thinking along, as one who pastes."""

import ast
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import callbacks as lightning_callbacks

import lightning_feed

LOADERS = ("DataLoader", "WebLoader", "instantiate")
"""Last parts of the names of what makes loaders."""
Call = tuple[Path, int, ast.Call]
"""The file, the number of its cell (0 in a program), and the call in it."""


class CannotApply(Exception):
    """What is printed does not say what to do, or there is no such place."""


@dataclass
class Source:
    """The Python files of a project, and the cells of its notebooks, as text."""

    folder: Path
    program: str
    cells: dict[tuple[Path, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.py")):
            self.cells[path, 0] = path.read_text()
        for path in sorted(self.folder.glob("*.ipynb")):
            for number, cell in enumerate(json.loads(path.read_text())["cells"]):
                if cell["cell_type"] == "code":
                    self.cells[path, number] = "".join(cell["source"])

    def save(self) -> None:
        """Write all back."""
        for path in {path for path, _ in self.cells}:
            if path.suffix == ".py":
                path.write_text(self.cells[path, 0])
                continue
            notebook = json.loads(path.read_text())
            for (file, number), text in self.cells.items():
                if file == path:
                    notebook["cells"][number]["source"] = text
            path.write_text(json.dumps(notebook))

    def calls(self, *names: str) -> list[Call]:
        """Calls of what has one of these names, behind a dot or not."""
        return [
            (path, number, node)
            for (path, number), text in self.cells.items()
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and _name(node.func) in names
        ]

    def replace(self, place: tuple[Path, int], node: ast.expr, new: str) -> None:
        """Put other text where an expression stands."""
        text = self.cells[place]
        start, end = _at(text, node.lineno, node.col_offset), _at(text, node.end_lineno, node.end_col_offset)
        self.cells[place] = text[:start] + new + text[end:]

    def set_keywords(self, call: Call, code: str) -> None:
        """Give a call these keyword arguments; those that it has get the new value."""
        path, number, node = call
        text = self.cells[path, number]
        changes = []
        have = {keyword.arg: keyword.value for keyword in node.keywords}
        added = []
        for name, value in keywords(code).items():
            if name in have:
                old = have[name]
                start = _at(text, old.lineno, old.col_offset)
                changes.append((start, _at(text, old.end_lineno, old.end_col_offset), value))
            else:
                added.append(f"{name}={value}")
        if added:
            last = max([node.func, *node.args, *have.values()], key=lambda one: (one.end_lineno, one.end_col_offset))
            end = _at(text, last.end_lineno, last.end_col_offset)
            if last is node.func:
                end = text.index("(", end) + 1
            changes.append((end, end, ("" if last is node.func else ", ") + ", ".join(added)))
        for start, end, new in sorted(changes, reverse=True):
            text = text[:start] + new + text[end:]
        self.cells[path, number] = text
        self.import_names((path, number), code)

    def import_names(self, place: tuple[Path, int], code: str) -> None:
        """Import what the code names: from torch, lightning_feed or Lightning's callbacks."""
        text = self.cells[place]
        lines = []
        for name in sorted({node.id for node in ast.walk(_parsed(code)) if isinstance(node, ast.Name)}):
            if re.search(rf"\b(import|class|def)\b.*\b{name}\b", text):
                continue
            if name == "torch":
                lines.append("import torch")
            elif name in lightning_feed.__all__:
                door = "lightning_feed.pl" if "pytorch_lightning" in text else "lightning_feed"
                lines.append(f"from {door} import {name}")
            elif hasattr(lightning_callbacks, name):
                door = "pytorch_lightning" if "pytorch_lightning" in text else "lightning.pytorch"
                lines.append(f"from {door}.callbacks import {name}")
            elif name.startswith("Slow"):
                lines.append(f"from zoo_faults import {name}")
        if lines:
            self.insert(place, "\n".join(lines), after_imports=False)

    def insert(self, place: tuple[Path, int], code: str, *, after_imports: bool) -> None:
        """Put lines before the first import, or behind the last."""
        text = self.cells[place]
        imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        line = (imports[-1].end_lineno if after_imports else imports[0].lineno - 1) if imports else 0
        lines = text.splitlines()
        self.cells[place] = "\n".join([*lines[:line], code, *lines[line:]]) + "\n"


def apply(remedy: Any, folder: Path, program: str) -> list[str]:
    """Change the project in ``folder``.

    Args:
        remedy: with ``code``, ``form`` and ``where``.
        folder: holds the project's files.
        program: the file that is run.

    Returns:
        What to append to the command line.

    Raises:
        CannotApply: what is printed does not say what to do.
    """
    code, form, where = remedy.code, remedy.form, remedy.where
    source = Source(folder, program)
    if form == "override":
        return shlex.split(code)
    if form == "arguments":
        for call in _loader_calls(source, where):
            source.set_keywords(call, code)
    elif form == "trainer":
        source.set_keywords(_only(source.calls("Trainer"), "Trainer"), code)
    elif form == "callback":
        _add_callback(source, code)
    elif form == "settings":
        _set_settings(source, code, where)
    elif form == "datamodule":
        name = _between(r"(?:\(|makes your )(\w+)\)?$", where)
        source.set_keywords(_only(source.calls(name), name), code)
    elif form == "replacement" and "FastDataModule.wrap(" in code:
        _wrap(source, code, where)
    else:
        raise CannotApply(f"no form: {form!r} for {code!r}")
    source.save()
    return []


def keywords(code: str) -> dict[str, str]:
    """Names and values of keyword arguments, as text.

    Raises:
        CannotApply: it is none.
    """
    call = _parsed(f"dict({code})")
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise CannotApply(f"{code!r} is no list of keyword arguments")
    return {str(keyword.arg): ast.unparse(keyword.value) for keyword in call.keywords}


def _parsed(code: str) -> ast.AST:
    """An expression or statements; keyword arguments count as the call that they are for."""
    for text in (code, f"dict({code})"):
        try:
            body = ast.parse(text).body
        except SyntaxError:
            continue
        return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else ast.Module(body, [])
    raise CannotApply(f"{code!r} is no Python")


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _at(text: str, line: int | None, column: int | None) -> int:
    """Index of a place that ast names: it counts bytes of a line."""
    lines = text.splitlines(keepends=True)
    number = (line or 1) - 1
    return sum(map(len, lines[:number])) + len(lines[number].encode()[:column].decode())


def _between(pattern: str, where: str) -> str:
    found = re.search(pattern, where)
    if found is None:
        raise CannotApply(f"{where!r} does not say where")
    return found.group(1)


def _only(calls: list[Call], what: str) -> Call:
    if len(calls) != 1:
        raise CannotApply(f"{len(calls)} calls of {what}")
    return calls[0]


def _loader_calls(source: Source, where: str) -> list[Call]:
    """The calls that make the training loaders: those of the lines that are named, else the only one in the function
    that is, else the only one that is for training by its name. The last in a file comes first, so that places hold."""
    factory = re.search(r"your (\w+)\(\.\.\.\)", where)
    calls = source.calls(*((factory.group(1),) if factory else LOADERS))
    loader = re.search(r'loader "([^"]+)"', where)
    if loader is not None:
        calls = [call for call in calls if _key_of(source, call) == loader.group(1)]
    files = {path.name for path, _ in source.cells}
    lines = [(file, line) for file, line in re.findall(r"(?<![\w/-])([\w-]+\.py):(\d+)", where) if file in files]
    if "passed to trainer.fit in" in where:  # the line is that of the call, and not of the loader
        lines = []
    if not lines and "passed to trainer.fit" in where:
        calls = [call for call in calls if _is_given_to_fit(source, call)]
    found = []
    for file, line in lines:
        inside = [call for call in calls if call[0].name == file and _inside(source, call, int(line))]
        if "each of your" in where and len(lines) == 1:  # the line is that of the function that makes them all
            found += inside
        else:
            found.append(_for_training(source, inside, where))
    found = found or [_for_training(source, calls, where)]
    return sorted(found, key=lambda call: (call[0], call[1], call[2].lineno), reverse=True)


def _is_given_to_fit(source: Source, call: Call) -> bool:
    """Whether a call makes what is the second argument of ``trainer.fit``, by the name of a variable or itself."""
    given = {
        ast.unparse(one)
        for _, _, fit in source.calls("fit")
        for one in [*fit.args[1:2], *(keyword.value for keyword in fit.keywords if keyword.arg == "train_dataloaders")]
    }
    assigned = [node for node in ast.walk(ast.parse(source.cells[call[0], call[1]])) if isinstance(node, ast.Assign)]
    names = {ast.unparse(one) for node in assigned if node.value.lineno == call[2].lineno for one in node.targets}
    return bool(given & {ast.unparse(call[2]), *names})


def _for_training(source: Source, calls: list[Call], where: str) -> Call:
    if len(calls) > 1:
        calls = [call for call in calls if "train" in _around(source, call)]
    return _only(calls, f"what makes the loader of {where!r}")


def _inside(source: Source, call: Call, line: int) -> bool:
    """Whether a line is of the call, or of the function around it where no call is on the line."""
    path, number, node = call
    if node.lineno <= line <= (node.end_lineno or 0):
        return True
    return any(
        function.lineno <= line <= (function.end_lineno or 0)
        and function.lineno <= node.lineno <= (function.end_lineno or 0)
        and not any(
            other.lineno <= line <= (other.end_lineno or 0)
            for other in ast.walk(function)
            if isinstance(other, ast.Call) and _name(other.func) in LOADERS
        )
        for function in ast.walk(ast.parse(source.cells[path, number]))
        if isinstance(function, ast.FunctionDef)
    )


def _key_of(source: Source, call: Call) -> str | None:
    """The key under which a call stands in a dict."""
    for node in ast.walk(ast.parse(source.cells[call[0], call[1]])):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if value.lineno == call[2].lineno and isinstance(key, ast.Constant):
                    return str(key.value)
    return None


def _around(source: Source, call: Call) -> str:
    """Name of the innermost function around a call, and of the variable that it is assigned to."""
    node, names = call[2], ""
    for other in ast.walk(ast.parse(source.cells[call[0], call[1]])):
        holds = getattr(other, "lineno", 0) <= node.lineno <= (getattr(other, "end_lineno", 0) or 0)
        if holds and isinstance(other, ast.FunctionDef):
            names += other.name + " "
        elif holds and isinstance(other, ast.Assign):
            names += ast.unparse(other.targets[0]) + " "
        elif isinstance(other, ast.Call) and other.lineno == node.lineno and _name(other.func) in LOADERS:
            names += ast.unparse(other.args[0]) if other.args else ""
    return names.lower()


def _add_callback(source: Source, code: str) -> None:
    trainer = _only(source.calls("Trainer"), "Trainer")
    kind = _name(_parsed(code).func)  # type: ignore[attr-defined]
    given = next((one.value for one in trainer[2].keywords if one.arg == "callbacks"), None)
    if given is None:
        source.set_keywords(trainer, f"callbacks=[{code}]")
        return
    if not isinstance(given, ast.List):
        raise CannotApply("callbacks of the Trainer are no list")
    kept = [ast.unparse(one) for one in given.elts if not (isinstance(one, ast.Call) and _name(one.func) == kind)]
    source.set_keywords(trainer, f"callbacks=[{', '.join([*kept, code])}]")


def _wrap(source: Source, code: str, where: str) -> None:
    """Put the call that makes the data module into the call of ``wrap`` in the last line of the code."""
    name = _between(r"in place of (\w+)\(\.\.\.\)", where)
    path, number, node = _only(source.calls(name), name)
    call = code.splitlines()[-1]
    source.replace((path, number), node, call.replace(f"{name}(...)", ast.unparse(node)))
    source.import_names((path, number), call)


def _set_settings(source: Source, code: str, where: str) -> None:
    made = source.calls("LoaderSettings")
    if made:
        source.set_keywords(_only(made, "LoaderSettings"), code)
        return
    name = _between(r"(\w+)\W*$", where)
    source.set_keywords(_only(source.calls(name), name), f"loader=LoaderSettings({code})")
