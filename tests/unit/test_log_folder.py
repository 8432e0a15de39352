"""A folder is tried by writing to it, and nothing stays in it."""

from __future__ import annotations

from pathlib import Path

from ddplaunch.features.health.log_folder import probe


def test_a_folder_that_can_be_written_to(tmp_path: Path) -> None:
    state = probe(str(tmp_path))
    assert (state.folder, state.error) == (str(tmp_path), "")
    assert state.used_share is not None
    assert 0 <= state.used_share <= 1
    assert not list(tmp_path.iterdir())


def test_one_that_cannot(tmp_path: Path) -> None:
    assert probe(str(tmp_path / "missing")).error == "No such file or directory"
    assert probe("/proc").error
