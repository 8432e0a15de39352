"""The newest whole checkpoint in a folder, or among the files and folders of a pattern: the rules that find it.

Runs in a thread of the agent: a file system may not answer for a long time. Reads names, sizes, times and the ends of
files, and imports nothing that wrote them. Raises nothing for any content of the files. What is whole:

- what a mark beside it names: a link ``latest``, or a file of ``_MARKS`` with its name or its number. They are written
  last, so that nothing else in the folder is looked at;
- a folder with ``.metadata`` (torch.distributed.checkpoint) or with ``trainer_state.json`` (Trainer of transformers):
  both are written last;
- any other folder or file that has rested, that is, had the same sizes and times in two looks, or whose writers have
  ended; and in which no zip archive (``torch.save``) and no safetensors file is cut off.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import stat
import struct
from collections.abc import Iterator
from itertools import count
from typing import BinaryIO, NamedTuple

_MARKS = ("latest", "latest_checkpointed_iteration.txt", "last_checkpoint")
"""Of DeepSpeed, of Megatron, and of detectron2 and others."""

_BY_NUMBER = ("iter_{:07d}", "global_step{}", "step-{}", "checkpoint-{}")
"""Names of folders that a mark gives by their number."""

_FILES = (".ckpt", ".pt", ".pth", ".pth.tar", ".bin", ".safetensors", ".pkl", ".npz")
_UNFINISHED = re.compile(r"^\.|^(tmp|temp)[-_.]|\.(tmp|temp|part|incomplete)$|\.bad\d*$", re.IGNORECASE)
_STEP = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt)[=_-]?0*(\d{1,15})", re.IGNORECASE)
_GLOBAL_STEP = re.compile(rb'"global_step"\s*:\s*(\d{1,15})')

_MAX_CANDIDATES, _MAX_NAMES, _MAX_FILES, _MAX_DEPTH = 16, 10_000, 4096, 3
_MAX_MARK, _MAX_STATE, _MAX_HEADER, _MAX_ZIP_END = 256, 8 << 20, 100 << 20, 66_000

Signature = tuple[int, int, int]
"""Number of files, bytes, and the newest time of a change in nanoseconds."""


class Found(NamedTuple):
    """A whole checkpoint.

    Attributes:
        saved_ns: when it was complete, in nanoseconds since 1970.
        step: number of the training step; 0 if it is not known.
    """

    path: str
    saved_ns: int
    step: int = 0

    @property
    def text(self) -> str:
        """As ``Part.saved``: it differs from that of any other checkpoint, also of the same path."""
        return f"{self.saved_ns}:{self.path}"


class Search:
    """Looks again and again; only one thread at a time."""

    def __init__(self, pattern: str) -> None:
        """``pattern``: an absolute path, of a folder with checkpoints, of one checkpoint, or with ``*``."""
        self._pattern = pattern
        self._seen: dict[str, Signature] = {}
        self._whole: dict[str, tuple[Signature, Found]] = {}

    def newest(self, *, all_ended: bool) -> Found | None:
        """The newest whole checkpoint; None if there is none. ``all_ended``: nobody writes any more."""
        marked = _marked(self._pattern) if os.path.isdir(self._pattern) else {}
        return next(iter(marked.values()), None) or self.newest_but("", all_ended=all_ended)

    def newest_but(self, bad: str, *, all_ended: bool) -> Found | None:
        """The newest whole one but ``bad``, whatever marks name."""
        seen, found = self._seen, list[Found]()
        self._seen = {}
        for path in _candidates(self._pattern):
            with contextlib.suppress(OSError, ValueError):
                if bad and os.path.samefile(path, bad):
                    continue
                if (each := self._examined(path, seen, all_ended)) is not None:
                    found.append(each)
        return max(found, key=lambda each: each.saved_ns, default=None)

    def _examined(self, path: str, seen: dict[str, Signature], all_ended: bool) -> Found | None:
        is_folder = os.path.isdir(path)
        if is_folder and (finished := _finished_folder(path)) is not None:
            return finished
        files = list(_files(path)) if is_folder else [path]
        if is_folder and any(name.endswith(".distcp") or name == "training_args.bin" for name in map(_name, files)):
            return None  # It has no mark yet.
        if is_folder and any(_UNFINISHED.search(_name(file)) for file in files):
            return None
        states = [os.stat(file) for file in files]
        signature = (len(states), sum(each.st_size for each in states), max([0, *(s.st_mtime_ns for s in states)]))
        self._seen[path] = signature
        known = self._whole.get(path)
        if known and known[0] == signature:
            return known[1]
        has_rested = signature[1] > 0 and (all_ended or seen.get(path) == signature)
        if not has_rested or not all(map(_is_complete, files)):
            return None
        self._whole[path] = signature, (found := Found(path, signature[2], _step(path)))
        return found


def _name(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


def _candidates(pattern: str) -> list[str]:
    """The newest paths that may be checkpoints."""
    if glob.has_magic(pattern):
        paths = glob.glob(pattern, recursive=True)[:_MAX_NAMES]
    elif os.path.isdir(pattern):
        paths = list(_entries(pattern))
        folders = [path for path in paths if os.path.isdir(path)]  # At its end, Trainer writes files beside them.
        paths = folders or ([pattern] if _is_one(pattern) else paths)
    else:
        paths = [pattern]
    real = {os.path.realpath(path) for path in paths if not os.path.islink(path)}
    paths = [path for path in paths if not (os.path.islink(path) and os.path.realpath(path) in real)]
    dated = sorted(((_changed_ns(path), path) for path in paths if not _UNFINISHED.search(_name(path))), reverse=True)
    return [path for changed_ns, path in dated[:_MAX_CANDIDATES] if changed_ns]


def _is_one(folder: str) -> bool:
    """Whether the folder itself is a checkpoint, and not one that has some."""
    names = (".metadata", "trainer_state.json")
    return any(os.path.exists(os.path.join(folder, name)) for name in names)


def _entries(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MAX_NAMES:
                return
            is_folder = entry.is_dir()
            if entry.name.endswith(_FILES) or (is_folder and (re.search(r"\d", entry.name) or _is_one(entry.path))):
                yield entry.path


def _changed_ns(path: str) -> int:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else 0


def _finished_folder(folder: str) -> Found | None:
    for name in (".metadata", "trainer_state.json"):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            return Found(folder, os.stat(path).st_mtime_ns, _state_step(path) if name[0] != "." else _step(folder))
    return None


def _marked(folder: str) -> dict[str, Found]:
    """The marks in the folder, with what each names, if that exists."""
    found = dict[str, Found]()
    for path in (os.path.join(folder, name) for name in _MARKS):
        with contextlib.suppress(OSError, ValueError):
            is_link = os.path.islink(path)
            named = [os.path.realpath(path)] if is_link else _named(folder, _text(path)) if os.path.isfile(path) else ()
            for target in filter(os.path.exists, named):
                found.setdefault(path, Found(target, os.lstat(path).st_mtime_ns, _step(target)))
    return found


def _text(mark: str) -> str:
    return _head(mark, _MAX_MARK).decode("utf-8", "replace").strip()


def _named(folder: str, text: str) -> Iterator[str]:
    """Where a checkpoint may be that a mark names."""
    if re.fullmatch(r"\d{1,15}", text):
        yield from (os.path.join(folder, form.format(int(text))) for form in _BY_NUMBER)
    elif text and "\n" not in text and text.isprintable():
        yield os.path.join(folder, text)


def _files(folder: str) -> Iterator[str]:
    for number, (where, folders, names) in enumerate(os.walk(folder)):
        if where[len(folder) :].count("/") >= _MAX_DEPTH or number > _MAX_FILES:
            folders.clear()
        yield from (os.path.join(where, name) for name in names[:_MAX_FILES])


# What is in files.


def _head(path: str, limit: int) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return file.read(limit)


def _is_complete(path: str) -> bool:
    """False if the file is a zip archive or a safetensors file, and its end is missing. Others cannot be told."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            if begin.startswith(b"PK\x03\x04"):
                file.seek(max(0, size - _MAX_ZIP_END))
                return b"PK\x05\x06" in file.read()
            return _is_whole_safetensors(file, begin, size) if path.endswith(".safetensors") else True
    except OSError:
        return False


def _is_whole_safetensors(file: BinaryIO, begin: bytes, size: int) -> bool:
    """Its header, whose length the first 8 bytes have, says where each tensor ends."""
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size
    if length > min(size, _MAX_HEADER):
        return False
    ends = re.findall(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,18})\s*\]', file.read(length))
    return size >= 8 + length + max([0, *map(int, ends)])


def _step(path: str) -> int:
    numbers = _STEP.findall(_name(path))
    return int(numbers[-1]) if numbers else 0


def _state_step(path: str) -> int:
    """Of trainer_state.json."""
    found = _GLOBAL_STEP.search(_head(path, _MAX_STATE))
    return int(found[1]) if found else _step(os.path.dirname(path))


# A checkpoint that is set aside.


def set_aside(pattern: str, path: str) -> str:
    """Rename a checkpoint, so that nothing that looks for its name finds it.

    Marks, and links ``latest`` and ``last``, that name it name the one before; without one they are renamed, too. Other
    links follow it: one ``best`` keeps its meaning. Returns what was done, for the user: the new path, and each mark.

    Raises:
        OSError: it cannot be renamed, or a mark cannot be changed.
    """
    path = path.rstrip("/")
    before, new = Search(pattern).newest_but(path, all_ended=True), _bad_name(path)
    newest = before.path if before else ""
    done = [_turned(mark, newest if _name(mark).startswith(("latest", "last")) else new) for mark in _marks_of(path)]
    os.rename(path, new)
    return ", ".join([new, *done])


def _marks_of(path: str) -> list[str]:
    """The marks, and all other links, that name ``path`` and stand beside it."""
    folder, name = os.path.split(path)
    named = {mark: found.path for mark, found in _marked(folder).items()}
    paths = (os.path.join(folder, each) for each in os.listdir(folder))
    named |= {link: link for link in paths if os.path.islink(link) and os.path.exists(link)}
    return [mark for mark, to in named.items() if _name(mark) != name and os.path.samefile(to, path)]


def _bad_name(path: str) -> str:
    return next(name for number in count(1) if not os.path.lexists(name := f"{path}.bad{number}"))


def _turned(mark: str, to: str) -> str:
    """Have a mark name the checkpoint ``to``, in its own form; rename it if it cannot. Returns what was done."""
    folder, name = os.path.split(mark)
    text = _name(to) if to and os.path.samefile(os.path.dirname(to), folder) else ""
    if text and not os.path.islink(mark) and _text(mark).isdecimal():
        step = _step(to)
        text = str(step) if text in (form.format(step) for form in _BY_NUMBER) else ""
    if not text:
        os.rename(mark, new := _bad_name(mark))
        return f"{name} as {_name(new)}"
    made = f"{mark}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(made)
    if os.path.islink(mark):
        os.symlink(text, made)
    else:
        with open(made, "x") as file:
            file.write(text)
        os.chmod(made, stat.S_IMODE(os.stat(mark).st_mode))
    os.replace(made, mark)
    return f"and {name} names {_name(to)} now"
