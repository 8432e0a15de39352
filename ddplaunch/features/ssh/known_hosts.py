"""The user's trusted host keys, in OpenSSH's files (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT).

Runs in the launcher. The files are read once and indexed by name: paramiko's reader takes time quadratic in the file's
length, and 35 ms for each look-up among 2,000 hashed names.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from pathlib import Path

_HASH_MAGIC = "|1|"
_KRL_MAGIC = b"SSHKRL"

Result = Literal["known", "unknown", "changed", "other type", "revoked", "authority"]


@dataclass(frozen=True)
class _Line:
    marker: str
    key_type: str
    key: str
    location: str


def host_names(name: str, port: int, alias: str = "") -> tuple[str, ...]:
    """Names of a host in the files: first the one that OpenSSH writes, then others that it accepts."""
    if alias:
        return (alias.lower(),)
    name = name.lower()
    return (name,) if port == 22 else (f"[{name}]:{port}", name)


class KnownHosts:
    """The contents of some known_hosts files. Any thread.

    Raises:
        OSError: an existing file cannot be read.
        ValueError: ``revoked_keys`` is a binary revocation list, which is not supported.
    """

    def __init__(self, paths: Sequence[Path], revoked_keys: Path | None = None) -> None:
        self._paths = tuple(paths)
        self._lock = threading.Lock()
        self._by_name: dict[str, list[_Line]] = {}
        self._hashed: list[tuple[bytes, bytes, _Line]] = []
        self._patterns: list[tuple[str, _Line]] = []
        self._revoked = set(_read_keys(revoked_keys)) if revoked_keys else set()
        for path in paths:
            self._load(path)

    def check(self, names: Sequence[str], key_type: str, key: str) -> tuple[Result, str]:
        """Whether ``key`` (base64) is trusted for the host with these names (see ``host_names``).

        ``changed``: the files have another key of this type. ``other type``: they have only keys of other types.
        ``authority``: they have only the key of a certificate authority. With the file and line of the key, if the
        answer is due to one.
        """
        with self._lock:
            found = [list(self._lines(name)) for name in names]
        lines = found[0]
        for line in (line for group in found for line in group):
            if line.marker == "@revoked" and line.key == key:
                return "revoked", line.location
        if key in self._revoked:
            return "revoked", "RevokedHostKeys"
        if any(line.key == key and not line.marker for group in found for line in group):
            return "known", ""
        host_keys = [line for line in lines if not line.marker]
        for line in host_keys:
            if line.key_type == key_type:
                return "changed", line.location
        if host_keys:
            return "other type", host_keys[0].location
        authorities = [line.location for line in lines if line.marker == "@cert-authority"]
        return ("authority", authorities[0]) if authorities else ("unknown", "")

    def key_types(self, names: Sequence[str]) -> tuple[str, ...]:
        """The types of the keys known for a host."""
        with self._lock:
            lines = [line for name in names for line in self._lines(name)]
        return tuple(dict.fromkeys(line.key_type for line in lines if not line.marker))

    def add(self, name: str, key_type: str, key: str, *, hashed: bool) -> None:
        """Trust a key of the host, and append it to the first file, as ``StrictHostKeyChecking accept-new`` does.

        Raises:
            OSError: the file cannot be written.
        """
        written_name = _hash(name) if hashed else name
        with self._lock:
            if any(line.key == key and not line.marker for line in self._lines(name)):
                return
            path = self._paths[0]
            _append(path, f"{written_name} {key_type} {key}\n")
            self._by_name.setdefault(name, []).append(_Line("", key_type, key, f"{path}"))

    def _load(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            for number, line in enumerate(text.splitlines(), 1):
                self._add_line(line.split(), f"{path}:{number}")

    def _add_line(self, words: list[str], location: str) -> None:
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#"):
            return
        hosts, key_type, key = words[:3]
        line = _Line(marker, key_type, key, location)
        if hosts.startswith(_HASH_MAGIC):
            with contextlib.suppress(ValueError, binascii.Error):
                salt, digest = (base64.b64decode(part) for part in hosts[len(_HASH_MAGIC) :].split("|"))
                self._hashed.append((salt, digest, line))
        elif re.search(r"[*?!]", hosts):
            self._patterns.append((hosts.lower(), line))
        else:
            for host in hosts.lower().split(","):
                self._by_name.setdefault(host, []).append(line)

    def _lines(self, name: str) -> Iterator[_Line]:
        yield from self._by_name.get(name, ())
        yield from (line for pattern, line in self._patterns if _matches(pattern, name))
        raw = name.encode()
        yield from (line for salt, digest, line in self._hashed if hmac.digest(salt, raw, hashlib.sha1) == digest)


def _matches(patterns: str, name: str) -> bool:
    """Whether one of the comma-separated patterns matches ``name``, and none that starts with ``!``."""
    matches = False
    for pattern in patterns.split(","):
        expression = re.escape(pattern.lstrip("!")).replace(r"\*", ".*").replace(r"\?", ".")
        if re.fullmatch(expression, name):
            if pattern.startswith("!"):
                return False
            matches = True
    return matches


def _hash(name: str) -> str:
    salt = os.urandom(20)
    parts = (salt, hmac.digest(salt, name.encode(), hashlib.sha1))
    return _HASH_MAGIC + "|".join(base64.b64encode(part).decode() for part in parts)


def _append(path: Path, line: str) -> None:
    """Append a line in one write, so that lines of two processes do not mix; end an unfinished last line first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        is_open_ended = os.path.isfile(path) and file.seek(0, os.SEEK_END) and os.pread(fd, 1, file.tell() - 1) != b"\n"
        file.write(b"\n" * bool(is_open_ended) + line.encode())


def _read_keys(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    if data.startswith(_KRL_MAGIC):
        raise ValueError(f"RevokedHostKeys {path} is a binary list, which only OpenSSH can read")
    for line in data.decode("utf-8", "replace").splitlines():
        words = line.split()
        if len(words) >= 2 and not words[0].startswith("#"):
            yield words[1]
