"""README and the program say the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ddplaunch import cli, environ, errors, forwarding
from ddplaunch.config import LaunchConfig
from ddplaunch.worker.rehearsal.tables import NOT_REHEARSED, REHEARSED
from tests.support.runs import ROOT

README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_option_in_the_readme_is_one_of_ours_or_of_the_example_script():
    ours = {name for option in cli.command.params for name in option.opts if name.startswith("--")} | {"--help"}
    example = {
        f"--{name}" for name in re.findall(r'"--([a-z-]+)"', (ROOT / "scripts/examples/train_digits.py").read_text())
    }
    slurms = {f"--{name}" for name in ("nodes", "ntasks-per-node", "gpus-per-task", "signal", "resv-ports", "map-by")}
    others = {"--lr", "--resume", "--epochs", "--kill-on-bad-exit", "--no-kill", "--requeue", *slurms}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - others
    assert named - ours - example == set()


def test_the_table_of_forwarded_variables_is_the_one_in_the_code():
    assert forwarding.readme_table().strip() in README


def test_what_a_dry_run_rehearses_is_what_the_code_says():
    rehearsed, refused = section("Examples").split("| not rehearsed |")
    assert dict(re.findall(r"^\| `(.*?)` \| (.*) \|$", rehearsed.split("| rehearsed |")[1], re.MULTILINE)) == REHEARSED
    rows = re.findall(r"^\| (.*?) \| (.+) \|$", refused, re.MULTILINE)
    told = {name.strip("`"): how for names, how in rows for name in (names.split(", ") if how == "stops" else [names])}
    assert told == NOT_REHEARSED


def test_the_environment_table_is_the_one_in_the_code():
    rows = re.findall(r"^\| ([A-Z_]+) \| (.*) \|$", section("Environment of a worker"), re.MULTILINE)
    assert dict(rows) == environ.NAMES


def test_every_exit_code_of_our_own_is_in_the_table():
    codes = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", section("Exit codes"), re.MULTILINE)}
    assert codes <= table


def examples() -> list[str]:
    blocks = re.findall(r"^(?:ddplaunch|python -m ddplaunch) .*$", section("Examples"), re.MULTILINE)
    assert len(blocks) >= 8
    return [line for line in blocks if not re.match("ddplaunch --(ps|kill|check)", line)]  # They look at once.


@pytest.mark.parametrize("line", examples())
def test_every_example_is_understood(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "hosts.txt").write_text("gpu1 slots=4\ngpu2 slots=4\n")
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "MY_NAME"):
        monkeypatch.setenv(name, "x")
    arguments = shlex.split(line, comments=True)
    arguments = arguments[arguments.index("ddplaunch") + 1 :]
    config = cli.command.main(arguments, prog_name="ddplaunch", standalone_mode=False)
    assert isinstance(config, LaunchConfig)
