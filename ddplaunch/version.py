"""The version of the package: the one place where it is written, and the commit of a checkout."""

from __future__ import annotations

import os

__version__ = "0.2.0"

_HASH_DIGITS = set("0123456789abcdef")
_HASH_LENGTHS = (40, 64)
"""Of SHA-1 and of SHA-256."""


def commit() -> str:
    """The commit of the checkout from which this package is imported, shortened to 7 digits.

    Empty for an installed package, also within a repository of the user's, and where git's files do not say it. Starts
    no process; changes that are not committed do not count.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(os.path.join(root, "scripts", "lib", "size_budget.py")):
        return ""
    try:
        found = _head(os.path.join(root, ".git"))
    except (OSError, ValueError):
        return ""
    return found[:7] if len(found) in _HASH_LENGTHS and set(found) <= _HASH_DIGITS else ""


def _head(git: str) -> str:
    """The commit that is checked out; ``git`` is a folder or, in a linked worktree, a file that names it."""
    if os.path.isfile(git):
        git = os.path.join(os.path.dirname(git), _text(git).removeprefix("gitdir: "))
    head = _text(os.path.join(git, "HEAD"))
    if not head.startswith("ref: "):
        return head
    branch = head.removeprefix("ref: ")
    shared = os.path.join(git, "commondir")
    if os.path.exists(shared):
        git = os.path.join(git, _text(shared))
    if os.path.exists(loose := os.path.join(git, branch)):
        return _text(loose)
    lines = _text(os.path.join(git, "packed-refs")).splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {branch}")), "")


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read(1 << 20).strip()
