"""Looks what is at the path of the launcher's environment on this machine, for ``--env pack``.

Runs in an agent without a run, in its main thread.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any, BinaryIO

from ddplaunch.features.environments import listing, places
from ddplaunch.features.environments.queries import EnvironmentFound, LookForEnvironment
from ddplaunch.features.snapshot import placed
from ddplaunch.text import quote

_VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
_START_S = 60.0


def serve(query: LookForEnvironment, _stream: BinaryIO, outbox: Any) -> None:
    """Answer the query; others may follow."""
    base, _ = _version(query.base) if query.base else ("", "")
    python, problem = _version(query.python)
    is_same = _is_same(query)
    found = EnvironmentFound(
        is_same=is_same,
        is_other=not is_same and os.path.lexists(query.folder) and not placed.is_ours(query.folder),
        machine=quote(os.uname().machine),
        libc=quote(places.libc()),
        base=base,
        python=python,
        problem=problem,
    )
    outbox.send(found)


def _is_same(query: LookForEnvironment) -> bool:
    if listing.identity_of(query.python) == query.identity:
        return True
    with contextlib.suppress(OSError):
        files = listing.files_of(query.folder, query.left_out, query.base_folder) if query.signature else {}
        return bool(files) and listing.signature_of(files) == query.signature
    return False


def _version(python: str) -> tuple[str, str]:
    """The version of an interpreter, or why it does not run."""
    command = [python, "-I", "-S", "-c", _VERSION]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S, check=False)
    except OSError as error:
        return "", quote(f"{python}: {error.strerror}", 1000)
    except subprocess.TimeoutExpired:
        return "", quote(f"{python} does not start within {_START_S:g} s", 1000)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"it ended with {done.returncode}"]
        return "", quote(f"{python} does not start: {said[-1]}", 1000)
    return quote(done.stdout.decode("utf-8", "replace").strip(), 100), ""
