"""What several tests of real runs on this machine need."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import unused_port


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """The file that lets the workers of ``detached.job`` end; at the end of a test they do."""
    file = tmp_path / "go"
    yield file
    file.touch()


@pytest.fixture
def run_id() -> str:
    """An id that no other run has."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def port() -> int:
    return unused_port()
