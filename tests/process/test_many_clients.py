"""The workers' store serves more workers than the user's soft limit of open files allows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.runs import PROGRAMS, environment

pytestmark = pytest.mark.torch


def test_a_store_has_more_clients_than_the_soft_limit_of_open_files():
    command = [sys.executable, str(PROGRAMS / "many_clients.py"), "48"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.stdout == "1 2\n", done.stderr[-2000:]
