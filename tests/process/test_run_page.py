"""run.html of real runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.runs import PROGRAMS, run, start

EXIT_WITH = PROGRAMS / "exit_with.py"
ON = {"DDPLAUNCH_PAGE": "on"}


def test_a_short_run_has_a_page_when_it_is_asked_for(tmp_path: Path):
    finished = run("--nproc-per-node", "2", "--log-dir", tmp_path, EXIT_WITH, "*=code:0", env=ON)
    page = finished.run_dir / "run.html"
    assert not page.exists()
    assert run("--page", finished.run_dir.name, "--log-dir", tmp_path).out.strip() == str(page)
    assert "succeeded" in page.read_text()


def test_a_short_run_that_failed_has_a_page(tmp_path: Path):
    finished = run("--nproc-per-node", "2", "--log-dir", tmp_path, EXIT_WITH, "*=raise:boom", env=ON)
    page = (finished.run_dir / "run.html").read_text()
    assert "RuntimeError: boom" in page
    assert "report.json is missing" not in page


def test_on_exit_finds_the_page():
    finished = run("--on-exit", 'ls "$DDPLAUNCH_RUN_DIR"', EXIT_WITH, "*=code:0", env=ON)
    assert "run.html" in finished.out.split()


@pytest.mark.parametrize(("options", "env"), [(("--no-page",), ON), ((), {"DDPLAUNCH_PAGE": "off"})])
def test_no_page(options: tuple[str, ...], env: dict[str, str]):
    finished = run(*options, "--on-exit", 'ls "$DDPLAUNCH_RUN_DIR"', EXIT_WITH, "*=code:0", env=env)
    assert "report.json" in finished.out.split()
    assert "run.html" not in finished.out.split()


def test_ctrl_c_ends_the_server_with_0(tmp_path: Path):
    running = start("--serve", env={"XDG_STATE_HOME": str(tmp_path)})
    running.wait_for(r"^http://127\.0\.0\.1:\d+/")
    running.signal(signal.SIGINT)
    assert running.finish().returncode == 0
