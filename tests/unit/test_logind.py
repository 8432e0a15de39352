"""Whether a logout ends a process, from the files of systemd."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ddplaunch.features.come_back import detached
from tests.support import golden

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
SERVICES = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/terminal.scope\n"


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_user_name", lambda: "ada")


def said(root: Path, cgroup: str, **files: str) -> str:
    """What is said where /proc/self/cgroup and logind's ``files`` have this text."""
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return detached.ends_at_logout(root)


CONF = "etc/systemd/logind.conf"
YES = "[Login]\n KillUserProcesses = yes\n"


def test_a_session_is_ended_where_logind_says_so(tmp_path: Path) -> None:
    """A question is the files of logind."""

    def found(question: str) -> str:
        with tempfile.TemporaryDirectory(dir=tmp_path) as machine:
            return said(
                Path(machine), SESSION, **dict(file.split("=", 1) for file in question.split("; ") if "=" in file)
            )

    golden.check_answers("logind", found)


def test_root_is_spared_unless_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_user_name", lambda: "root")
    assert said(tmp_path, SESSION, **{CONF: YES}) == ""
    assert said(tmp_path, SESSION, **{CONF: YES + "KillExcludeUsers=\n"})


def test_services_of_a_user_end_at_the_last_logout_without_linger(tmp_path: Path) -> None:
    assert "enable-linger" in said(tmp_path, SERVICES)
    assert said(tmp_path, SERVICES, **{"var/lib/systemd/linger/ada": ""}) == ""


def test_elsewhere_nothing_is_said(tmp_path: Path) -> None:
    assert said(tmp_path, "0::/system.slice/slurmd.service/job_7\n", **{CONF: YES}) == ""
    assert detached.ends_at_logout(tmp_path / "none") == ""
