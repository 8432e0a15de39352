"""The version has one place; the commit is read from git's files as git reads them."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from ddplaunch import version
from tests.support import golden


def git(*words: str, at: Path) -> str:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@localhost", "-c", "init.defaultBranch=main")
    command = ("git", "-C", str(at), *identity, *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git("init", at=folder)
    git("commit", "--allow-empty", "--message", "first", at=folder)
    git("checkout", "-b", "topic/new", at=folder)
    git("commit", "--allow-empty", "--message", "second", at=folder)
    return folder


def commit_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a package in ``folder``, which has our file, says of itself."""
    own = folder / "scripts" / "lib" / "size_budget.py"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.touch()
    monkeypatch.setattr(version, "__file__", str(folder / "ddplaunch" / "version.py"))
    return version.commit()


CHANGES = (
    (),
    ("pack-refs", "--all"),
    ("commit", "--allow-empty", "--message", "third"),
    ("checkout", "main"),
    ("checkout", "--detach", "main"),
)


def test_a_checkout_says_its_commit_whatever_git_does(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in CHANGES:
        if words:
            git(*words, at=checkout)
        assert commit_of(checkout, monkeypatch) == git("rev-parse", "HEAD", at=checkout)[:7], words


def test_so_does_a_linked_worktree(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = checkout.parent / "linked"
    git("worktree", "add", "-b", "other", str(linked), "main", at=checkout)
    git("commit", "--allow-empty", "--message", "of the worktree", at=linked)
    head = git("rev-parse", "HEAD", at=linked)[:7]
    assert commit_of(linked, monkeypatch) == head
    git("pack-refs", "--all", at=checkout)
    assert commit_of(linked, monkeypatch) == head


def test_a_copy_in_a_repository_of_the_user_is_none_of_its_commits(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "__file__", str(checkout / "ddplaunch" / "version.py"))
    assert version.commit() == ""


def test_what_is_no_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question is files with their texts."""

    def commit(question: str) -> str:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for file in question.split("; "):
            name, _, text = file.partition(" = ")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode("latin-1"))
        return commit_of(folder, monkeypatch)

    golden.check_answers("no_checkouts", commit)
