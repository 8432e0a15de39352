"""Git repositories for tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_IDENTITY = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *arguments: str) -> str:
    """Run git in ``folder``, and return what it prints."""
    environ = {**os.environ, **_IDENTITY, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", "-C", folder, *arguments], env=environ, capture_output=True, check=True, text=True)
    return done.stdout.strip()


def repository(folder: Path, files: dict[str, str]) -> Path:
    """A repository in ``folder``, made if it is missing, with one commit that has ``files``, by path."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=first")
    return folder
