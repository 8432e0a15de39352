"""Hosts and what belongs to them: options and environment -> the fields of a LaunchConfig."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.cli import main
from ddplaunch.config import LaunchConfig, RemoteConfig
from ddplaunch.errors import UsageError
from tests.support import golden


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DDPLAUNCH_HOSTS", "DDPLAUNCH_HOSTFILE", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def config(*argv: str) -> LaunchConfig:
    return main.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)


def told(command: str) -> str:
    """Of ``NAME=VALUE --option ...``, what differs from a run on this machine."""
    words = command.split()
    argv = words[next((index for index, word in enumerate(words) if word.startswith("-")), len(words)) :]
    with pytest.MonkeyPatch.context() as patch:
        for word in words[: len(words) - len(argv)]:
            patch.setenv(*word.split("=", 1))
        found = config(*argv)
    hosts = [f"{host} {host.slots or ''} {host.devices or ''}".rstrip() for host in found.hosts]
    nodes = f"{found.transport}, {found.min_nodes}:{found.max_nodes} nodes" if hosts else "here"
    remote, usual = vars(replace(found.remote, environ=())), vars(RemoteConfig())
    changed = [f"{name}={value}" for name, value in remote.items() if value != usual[name]]
    limits = f"lost after {found.timeouts.lost_after_s} s, join {found.timeouts.join_timeout_s} s"
    parts = [", ".join(hosts), nodes, *changed, *([limits] if "--rdzv-conf" in argv else [])]
    assigns = ["the launcher assigns the rendezvous"] if found.launcher_assigns_rendezvous else []
    return "; ".join([*parts, *assigns, *(notice.text for notice in found.notices)])


def test_hosts_and_how_they_are_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("gpu1 slots=2\ngpu2\ngpu3\n")
    golden.check_answers("host_options", told)


@pytest.mark.parametrize("place", [("--rdzv-endpoint", "a:1"), ("--master-addr", "a"), ("--standalone",)])
@pytest.mark.parametrize("named_by", ["--hosts", "--hostfile", "--include"])
def test_hosts_and_another_place_to_meet_exclude_each_other(named_by: str, place: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"{named_by} and {place[0]} exclude each other"):
        config(named_by, "a,b", *place)


def test_what_workers_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / "env").write_text("A=1\nB=2\n")
    found = config("--hosts", "a", "--env-file", str(tmp_path / "env"), "-x", "B=3", "--export", "C=4").remote.environ
    assert {"NCCL_DEBUG": "INFO", "A": "1", "B": "3", "C": "4"}.items() <= dict(found).items()
