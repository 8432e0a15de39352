"""Which process of pytest-xdist runs which test, also once one of them has died."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import TIMEOUT_S, environment

CONFTEST = """
from tests.support.scheduling import Scheduling

def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)
"""
TESTS = """
import os, pytest

@pytest.mark.parametrize("number", range(60))
def test_each(number):
    if number == DIES:
        os._exit(1)
"""


@pytest.mark.parametrize(("processes", "dies"), [(1, 20), (3, 59)])
def test_a_process_that_dies_takes_one_test_with_it_and_the_others_run(
    tmp_path: Path, processes: int, dies: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS.replace("DIES", str(dies)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "-n", str(processes)]
    env = environment({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert re.findall(r"\d+ failed, \d+ passed", done.stdout) == ["1 failed, 59 passed"], done.stdout
