"""The command line: what it prints, where, and with which exit code."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import lightning_feed
from lightning_feed import cli
from lightning_feed.errors import DatasetError


@pytest.mark.parametrize(
    "argv",
    [
        ["tune"],
        ["diagnos", "train.py"],
        ["stage", "a"],
        ["demo", "extra"],
        ["demo", "--colour"],
        ["report", "RUN", "--fail-abov", "20"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage: lightning-feed" in capsys.readouterr().err


def test_all_commands_are_listed_if_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "Find what limits training by experiments" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["diagnose train.py --epochs 2", "tune -m pkg.train --epochs=2 -- --lr 3"])
def test_program_arguments_without_two_dashes_are_refused_with_a_hint(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(given.split())
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lightning-feed: error: unrecognized arguments: --epochs")
    command = given.split()[0]
    assert said.endswith(f"Those of your program come after two dashes: lightning-feed {command} SCRIPT.py -- ARGS")


def test_bash_completion_completes_a_command() -> None:
    shtab = pytest.importorskip("shtab")
    script = shtab.complete(cli.make_parser(), "bash")
    typed = "COMP_WORDS=(lightning-feed dia); COMP_CWORD=1; _shtab_lightning_feed lightning-feed dia lightning-feed"
    bash = ["bash", "-c", f'{script}\n{typed}\necho "${{COMPREPLY[@]}}"']
    done = subprocess.run(bash, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["diagnose"]


def test_python_m_lightning_feed_runs_the_same_main_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_feed", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == f"lightning-feed {lightning_feed.__version__}"
    (command,) = entry_points(group="console_scripts", name="lightning-feed")
    assert command.load() is cli.main


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (
            DatasetError("cats/1.jpg cannot be read. Delete it."),
            1,
            "lightning-feed: cats/1.jpg cannot be read. Delete it.",
        ),
        (KeyboardInterrupt(), 130, "lightning-feed: stopped"),
    ],
)
def test_errors_and_interrupts_are_reported_in_one_line(
    raised: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(**_: object) -> None:
        raise raised

    monkeypatch.setattr("lightning_feed.demo.run_demo", stop)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr() == ("", message + "\n")


def test_internal_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_feed.demo.run_demo", bug)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "{tmp}/nowhere"], "nowhere cannot be used: "),
        (["--data", "{tmp}/flat"], "flat cannot be used: "),
        (["--data", "{tmp}/empty"], "hold no images"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_demo_refuses_impossible_arguments(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.jpg").touch()
    (tmp_path / "empty" / "cats").mkdir(parents=True)
    out = tmp_path / "out"
    arguments = [word.format(tmp=tmp_path) for word in argv]
    assert cli.main(["demo", "--out", str(out), *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not out.exists()


def test_pack_and_stage_commands_write_and_report_samples(
    class_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pack", str(class_folders), str(tmp_path / "packed"), "--verify"]) == 0
    assert "packed: 12 samples" in capsys.readouterr().out
    assert cli.main(["pack", str(class_folders), str(tmp_path / "packed")]) == 1
    assert "exists" in capsys.readouterr().err
    assert cli.main(["pack", str(class_folders), str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 12
    (tmp_path / "fast").mkdir()
    assert cli.main(["stage", str(tmp_path / "packed"), str(tmp_path / "fast")]) == 0
    assert "3 files, 0.0 MB, copied, " in capsys.readouterr().out
    assert cli.main(["stage", str(tmp_path / "packed"), str(tmp_path / "fast"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["copied"] is False
