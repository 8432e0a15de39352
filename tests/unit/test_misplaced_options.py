"""Who gives options of ddplaunch to the script is told, unless the script may have such options of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.misplaced_options import misplaced, prepare, reads_arguments
from ddplaunch.features.misplaced_options.launcher import MisplacedOptions
from ddplaunch.protocol.results import WorkerExit
from ddplaunch.protocol.run_result import RunResult
from tests.support import golden
from tests.support.configs import launch_config


def test_options_of_ddplaunch_are_known_among_the_arguments() -> None:
    def found(arguments: str) -> str:
        words = arguments.split()
        return f"{misplaced(words)}, with abbreviations {misplaced(words, abbreviated=True)}"

    golden.check_answers("misplaced_options", found)


def test_only_a_script_that_cannot_know_its_arguments_is_said_to_read_none() -> None:
    assert reads_arguments("")
    golden.check_answers("scripts_that_read_arguments", reads_arguments)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page_lines(text: str, *arguments: str, said: str = "KeyError: 1", **fields: Any) -> list[str]:
    Path("x.py").write_text(text)
    first = WorkerExit(0, 0, "node1", 7, 2, False, 1.0, 1.0, tail=("usage: x.py", said))
    result = RunResult("r1", 2, "failed", 1.0, first_failure=first)
    config = replace(launch_config(script="x.py"), script_args=arguments, **fields)
    return [*MisplacedOptions(config).page_lines(result)]


def test_the_page_names_options_that_the_script_does_not_know(in_folder: Path) -> None:
    both = (
        "--nnodes, --max_restarts stand after the script, which gets them: options of ddplaunch stand before the script"
    )
    assert page_lines("import mine", "--nnodes", "2", "--max_restarts=3") == [f"options:  {both}"]
    refused = page_lines("import mine", "--nproc", "2", said="x.py: error: unrecognized arguments: --nproc 2")
    assert refused == [
        "options:  --nproc stands after the script, which gets it: options of ddplaunch stand before the script"
    ]
    of_module = {"said": "Error: No such option: --nnodes", "entry": "module"}
    assert page_lines("", "--nnodes", "2", **of_module)


def test_a_script_that_may_have_such_options_is_left_alone(in_folder: Path) -> None:
    assert page_lines("p.add_argument('--max_restarts')", "--max-restarts", "3") == []
    assert page_lines("@dataclass\nclass Args:\n    max_restarts: int", "--max-restarts", "3") == []
    assert page_lines("import mine", "--nproc", "2") == []
    assert page_lines("import mine", "--lrr", "2", said="x.py: error: unrecognized arguments: --lrr") == []
    for other in ({"entry": "module"}, {"entry": "program"}):
        assert page_lines("import mine", "--nnodes", "2", **other) == []


def test_a_warning_stands_at_the_start_only_if_it_is_certain(in_folder: Path) -> None:
    def warnings(text: str, *arguments: str) -> list[str]:
        Path("x.py").write_text(text)
        config = prepare(replace(launch_config(script="x.py"), script_args=arguments), None)
        return [notice.text for notice in config.notices if notice.kind == "warning"]

    assert warnings("print(1)", "--nproc-per-node", "2") == [
        "x.py reads no arguments; --nproc-per-node stands after the script, which gets it: "
        "options of ddplaunch stand before the script"
    ]
    assert warnings("print(1)", "--lr", "2") == []
    assert warnings("import mine", "--nproc-per-node", "2") == []
    Path("x.py").unlink()
    config = replace(launch_config(script="x.py"), script_args=("--nnodes", "2"))
    assert prepare(config, None) == config
