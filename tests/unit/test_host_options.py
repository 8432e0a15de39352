"""Hosts and what belongs to them: options and environment -> the fields of a LaunchConfig."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.cli import main
from ddplaunch.cli.commands import Request
from ddplaunch.config import LaunchConfig
from tests.support import command_lines, golden


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DDPLAUNCH_HOSTS", "DDPLAUNCH_HOSTFILE", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def config(*argv: str) -> LaunchConfig:
    return main.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)


@pytest.mark.features
def test_hosts_and_how_they_are_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("gpu1 slots=2\ngpu2\ngpu3\n")
    Path("other").write_text("gpu4\n")
    golden.check_answers("host_options", command_lines.told)


@pytest.mark.features
def test_a_command_reaches_the_hosts_of_an_allocation_as_a_run_does(monkeypatch: pytest.MonkeyPatch):
    asked: list[Request] = []
    monkeypatch.setattr("ddplaunch.features.ps.ps.ps", asked.append)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-4]")

    def transport(question: str) -> str:
        main.command.main(command_lines.parsed(question)[1], prog_name="ddplaunch", standalone_mode=False)
        return asked.pop().remote.transport

    golden.check_answers("transports_of_commands", transport)


@pytest.mark.features
def test_what_workers_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / "env").write_text("A=1\nB=2\n")
    found = config("--hosts", "a", "--env-file", str(tmp_path / "env"), "-x", "B=3", "--export", "C=4").remote.environ
    assert {"NCCL_DEBUG": "INFO", "A": "1", "B": "3", "C": "4"}.items() <= dict(found).items()
