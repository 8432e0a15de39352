"""Reads the newest usage sample of each node of a run, from the files that its launchers write.

Runs in the process that the user started, and only reads. A file may be cut off anywhere, damaged, or of another
version: what is no number is unknown, and a line that is not whole is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files import kept_files, run_json

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = "samples"
_MAX_BYTES = 64 << 20
_MAX_ROWS = 1 << 16

_Json = dict[str, Any]


@dataclass
class NodeSamples:
    """The file of one node, as far as it has been read.

    Attributes:
        head: its first line; empty until there is one.
        start: the line of the newest attempt; empty until there is one.
        newest: the newest sample of that attempt; empty until there is one.
    """

    path: Path
    head: _Json = field(default_factory=dict)
    start: _Json = field(default_factory=dict)
    newest: _Json = field(default_factory=dict)
    _inode: int = 0
    _offset: int = 0

    def refresh(self) -> None:
        """Read what has been written since the last call: all, if the file was written anew. Does not raise."""
        with contextlib.suppress(OSError), kept_files.open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            data = file.read(_MAX_BYTES)
            whole = data.rfind(b"\n") + 1
            self._offset += whole
            self._take(data[:whole].splitlines())

    def _take(self, lines: Iterable[bytes]) -> None:
        """Only lines that matter are parsed: the file of a day has hundreds."""
        last = b""
        for line in lines:
            if line.startswith(b'{"schema"'):
                self.head = _object(line) or self.head
            elif line.startswith(b'{"attempt"'):
                start = _object(line)
                if start.get("attempt") != self.start.get("attempt"):
                    self.newest, last = {}, b""
                self.start = start or self.start
            else:
                last = line
        if last:
            self.newest = _object(last) or self.newest


def _object(line: bytes) -> _Json:
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(line)
        return body if isinstance(body, dict) else {}
    return {}


def files(launcher_folders: Iterable[Path], known: dict[Path, NodeSamples]) -> list[NodeSamples]:
    """The files of all nodes, read up to now; those that are ``known`` go on where they were."""
    for folder in launcher_folders:
        with contextlib.suppress(OSError):
            for path in sorted((folder / FOLDER).iterdir()):
                if path.suffix == ".jsonl" and path not in known:
                    known[path] = NodeSamples(path)
    for samples in known.values():
        samples.refresh()
    return list(known.values())


def numbers(body: _Json, part: str, key: str) -> list[float | None]:
    """The values of ``key`` in ``part`` of a sample, in their order; empty if there are none."""
    values = of(body, part).get(key)
    return [run_json.finite(value) for value in values[:_MAX_ROWS]] if isinstance(values, list) else []


def of(body: _Json, part: str) -> _Json:
    """A part of a sample; empty if there is none."""
    found = body.get(part)
    return found if isinstance(found, dict) else {}
