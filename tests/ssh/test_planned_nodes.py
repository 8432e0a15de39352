"""What is planned for other machines is what their workers then get."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.runs import PROGRAMS, Finished, start

pytestmark = pytest.mark.ssh


def run(lab: Lab, *arguments: str | Path) -> Finished:
    given = ("--hosts", "node1:slots=1,node2:slots=2", "--ssh-config", lab.ssh_config, "--chdir", "/")
    given += ("-x", "DDPLAUNCH_TEST_MARK", "-x", "XDG_STATE_HOME")
    return start(*given, *arguments, under=lab.prefix, env={"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}).finish()


def test_workers_on_other_nodes_get_the_environment_that_was_planned(make_lab, tmp_path: Path) -> None:
    lab = make_lab(2)
    arguments = (PROGRAMS / "dump_environ.py", tmp_path)
    plan = json.loads(run(lab, "--plan", "--json", *arguments).out)
    finished = run(lab, *arguments)
    assert finished.returncode == 0, finished.err
    assert [rank["host"] for rank in plan["ranks"]] == ["node1", "node2", "node2"]
    for rank in plan["ranks"]:
        found = json.loads((tmp_path / f"{rank['rank']}.json").read_text())["environ"]
        for name, value in (plan["environ"] | rank["environ"]).items():
            pattern = ".+".join(map(re.escape, re.split("<[^>]+>", value)))
            assert re.fullmatch(pattern, found.get(name, "")), f"{name}: planned {value}, found {found.get(name)}"
