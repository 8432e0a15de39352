"""A folder is tried by writing to it, and nothing stays in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.features.health.log_folder import look
from ddplaunch.system.files import kept_files


@pytest.mark.parametrize(("used", "text"), [(0.95, "95% full"), (0.949, ""), (None, "")])
def test_a_folder_that_can_be_written_to(
    used: float | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_files, "used_share", lambda _folder: used)
    assert [(each.severity, each.text) for each in look(str(tmp_path))] == [
        ("warn", f"the disk of {tmp_path} is {text}") for _ in [text] if text
    ]
    assert not list(tmp_path.iterdir())


def test_one_that_cannot(tmp_path: Path) -> None:
    (found,) = look(str(tmp_path / "missing"))
    text = f"nothing can be written to {tmp_path}/missing: No such file or directory"
    assert (found.severity, found.text) == ("refuse", text)
    assert look("/proc")
