"""What a node is sent that has not the launcher's ddplaunch: it asks, and ``answer`` answers.

Runs in the launcher; ``receiver`` runs on the node. A node that asks prints a line before its facts: ``PREFIX`` and a
name of ``ANSWERS``. The answer on its stdin is a line with the number of bytes, and these bytes. Nothing is made
before the first node asks.

Which ddplaunch is the launcher's? Its version does not say it: two clones of the repository have one version, and other
files. For nearly all nodes ``identity`` says it at no cost: they have the same file at the same path, on a shared file
system, or have installed the same wheel. Other nodes compare all files before they ask for them.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddplaunch.features.remote import receiver
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT
from ddplaunch.version import __version__

PREFIX = b"@ddplaunch-needs@ "

_BASES = ("~/.local/state/ddplaunch/packages", "/tmp/ddplaunch-{uid}", "/dev/shm/ddplaunch-{uid}")
"""Folders for copies on a node. The home is the first: others are cleaned now and then, or when the user logs out."""

_VENDORED = ("pynvml",)
"""Modules of one Python file that agents import where they are installed: NVIDIA's GPUs are asked by it."""

HAS_PACKAGE = r"""
def has_package(root, own):
    path = os.path.realpath(root)
    try:
        status = os.stat(path + "/ddplaunch/version.py")
        if [path, status.st_ino, status.st_mtime_ns, status.st_size] == own["file"]:
            return True
        return own["wheel"] != "" and wheel_of(path, own["version"]) == own["wheel"]
    except Exception:
        return False

def wheel_of(root, version):
    import zlib
    with open("%s/ddplaunch-%s.dist-info/RECORD" % (root, version), "rb") as file:
        lines = [line for line in file.read().splitlines() if line.startswith(b"ddplaunch/") and b".py," in line]
    return "%d %d" % (len(lines), zlib.crc32(b"\n".join(sorted(lines)))) if lines else ""
"""
"""Text for Python: whether the folder ``root`` has the package of ``identity``. Valid from Python 2.7 on."""

_PIECE_BYTES = 64 << 10

_making = threading.Lock()
"""Many nodes may ask at once, each in a thread: what they are sent is made once."""


@cache
def identity() -> Mapping[str, Any]:
    """What shows at no cost that a node has this package; ``has_package`` compares it."""
    scope: dict[str, Any] = {"os": os}
    exec(HAS_PACKAGE, scope)
    root = os.path.realpath(PACKAGE_ROOT)
    status = os.stat(f"{root}/ddplaunch/version.py")
    try:
        wheel = scope["wheel_of"](root, __version__)
    except OSError:  # A clone.
        wheel = ""
    file = [root, status.st_ino, status.st_mtime_ns, status.st_size]
    return {"root": PACKAGE_ROOT, "version": __version__, "file": file, "wheel": wheel}


def answer(line: bytes, answered: set[str]) -> bytes:
    """What a node must get that has printed ``line``; empty if it asks for nothing, or once more for the same.

    ``answered``: what this node has asked for so far; is added to. Any thread.
    """
    name = line.removeprefix(PREFIX).decode("ascii", "replace").strip()
    if not line.startswith(PREFIX) or name not in ANSWERS or name in answered:
        return b""
    answered.add(name)
    with _making:
        data = ANSWERS[name]()
    return b"%d\n%s" % (len(data), data)


def give(line: bytes, answered: set[str], send: Callable[[bytes], object]) -> bool:
    """Send a node what it asks for by ``line``, in pieces; no bytes if it says that it receives. Any thread.

    Returns whether it does one of both.

    Raises:
        OSError: by ``send``.
    """
    if not line.startswith(PREFIX):
        return False
    data = answer(line, answered)
    for begin in range(0, max(len(data), 1), _PIECE_BYTES):
        send(data[begin : begin + _PIECE_BYTES])
    return True


@cache
def _files() -> dict[str, bytes]:
    found = dict(receiver.files_of(PACKAGE_ROOT, ["ddplaunch"]))
    for name in _VENDORED:
        spec = find_spec(name)
        if spec and spec.origin and spec.origin.endswith(f"{name}.py"):
            found[f"{name}.py"] = Path(spec.origin).read_bytes()
    return found


@cache
def _receiver() -> bytes:
    try:
        files = _files()
    except OSError as error:  # As in the middle of an upgrade: the node tells it.
        return json.dumps({"text": f"raise OSError({f'the launcher cannot read its own files: {error}'!a})"}).encode()
    own = ((path, data) for path, data in files.items() if path.startswith("ddplaunch/"))
    wanted = {"content": receiver.digest(own), "name": receiver.digest(files.items())}
    text = Path(receiver.__file__).read_text("utf-8")
    return json.dumps({"text": text, "wanted": wanted, "bases": _BASES}).encode()


@cache
def _package() -> bytes:
    return zlib.compress(json.dumps({path: data.decode() for path, data in _files().items()}).encode())


ANSWERS: dict[str, Callable[[], bytes]] = {"receiver": _receiver, "package": _package}
"""A feature may add what its own text on a node asks for."""
