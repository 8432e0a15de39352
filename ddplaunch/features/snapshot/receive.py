"""Makes a copy of a snapshot on this machine, for ``--sync``. Runs in an agent without a run, in its main thread.

Everything is below ``HOME_BASE``: ``snapshots/PROJECT/NAME`` are the copies, ``received`` beside them has files that
have arrived for one that is not complete, and ``work/PROJECT`` is the folder in which workers run. That has links to
the files of the newest copy, and whatever the workers write; only the links are ever removed. A copy that is to stand
at a path of its own is beside that, and has no such folder (``placed``).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot import content, copies, old_copies, peers, placed, work_folder
from ddplaunch.features.snapshot.copies import Facts
from ddplaunch.features.snapshot.queries import (
    MAX_WANTED,
    PART_BYTES,
    PROGRESS_S,
    CopyAnswer,
    CopyProgress,
    GiveFiles,
    Giving,
    KeepWaiting,
    MakeCopy,
    PutPart,
    Source,
    Wanted,
)
from ddplaunch.features.snapshot.records import HOME_BASE, MARKER
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote
from ddplaunch.threads import in_thread

_RECEIVED, _LOCK = "received", ".lock"
_LOOK_S = 0.1
_OTHERS_S = 600.0
"""So long an agent waits for another one that makes copies of the same project: of another launcher, or on another host
that shares the home."""

_LOST_S = 30.0
"""An agent for which another one waits ends if it has got nothing for so long: its launcher may be cut off."""

_lock: list[int] = []
"""The descriptor of the file by which this process holds the project, until it ends."""

_beside: dict[str, str] = {}
"""The folders of projects whose copies stand at a path of their own."""

_problems: list[str] = []
"""Why parts could not be kept since the last answer: the sender does not wait for an answer to each."""


_ALONE_S = 300.0
"""Every agent ends that has got nothing for so long; one whose launcher waits for other hosts gets something."""


class _Progress:
    """How far the copy is. A thread tells the launcher, which so knows that this host lives.

    Attributes:
        idle_since: when the last query was answered; None: one is being answered.
        is_over: the copy is made, and a run has begun here: nothing more is told.
    """

    def __init__(self) -> None:
        self.left = self.steps = 0
        self.idle_since: float | None = None
        self.is_over = self._is_told = False

    def tell(self, outbox: Any) -> None:
        """Tell it from now on."""
        if not self._is_told:
            self._is_told = True
            in_thread("progress", lambda: self._tell(outbox))

    def add(self, nbytes: int = 0) -> None:
        """A file is in its place, or ``nbytes`` of one have arrived. Any thread."""
        self.left, self.steps = max(0, self.left - nbytes), self.steps + 1

    def _tell(self, outbox: Any) -> None:
        while not self.is_over:
            outbox.send(CopyProgress(self.left, self.steps))
            idle_s = 0.0 if (since := self.idle_since) is None else time.monotonic() - since
            if idle_s > _ALONE_S or (idle_s > _LOST_S and _others_wait()):
                os._exit(0)
            time.sleep(PROGRESS_S)


_progress = _Progress()


def end() -> None:
    """The code is here, and this agent runs the job."""
    _progress.is_over = True
    peers.end()


def serve(query: MakeCopy | PutPart | GiveFiles | KeepWaiting, _stream: BinaryIO, outbox: Any) -> None:
    """Answer MakeCopy or GiveFiles, or keep what PutPart brings. Other queries, or a run, may follow."""
    if isinstance(query, KeepWaiting):
        _progress.idle_since = time.monotonic()
        return None
    if isinstance(query, GiveFiles):
        giving = Giving()
        with contextlib.suppress(LaunchError, OSError, ImportError):  # A Python may lack the module ssl.
            giving = _give(query)
        outbox.send(giving)
        return None
    _progress.idle_since = None
    _progress.tell(outbox)
    try:
        if isinstance(query, PutPart):
            return None if _problems else _keep_part(query)
        answer = CopyAnswer(problem=_problems.pop()) if _problems else _answer(query)
    except OSError as error:
        _make_room(query.project, error)
        answer = CopyAnswer(problem=quote(f"{error.filename or HOME_BASE}: {error.strerror}", 1000))
    except content.Changed as error:  # By a worker, in an earlier copy.
        answer = CopyAnswer(problem=quote(f"{error.path} changes while it is copied there", 1000))
    except (LaunchError, ValueError, KeyError, TypeError, zlib.error) as error:
        answer = CopyAnswer(problem=quote(str(error), 1000))
    finally:
        _progress.idle_since = time.monotonic()
    if isinstance(query, PutPart):
        _problems.append(answer.problem)
    else:
        outbox.send(answer)
    return None


def _project(name: str) -> str:
    return _beside.get(name) or os.path.join(os.path.expanduser(HOME_BASE), copies.FOLDER, name)


def _make_room(project: str, error: OSError) -> None:
    """Leave no gigabytes on a full disk."""
    if project in _beside and error.errno in (errno.ENOSPC, errno.EDQUOT):
        shutil.rmtree(_received(project, ""), ignore_errors=True)


def _received(project: str, digest: str) -> str:
    return os.path.join(_project(project), _RECEIVED, digest)


def _keep_part(part: PutPart) -> None:
    data = zlib.decompressobj().decompress(base64.b64decode(part.data), PART_BYTES)
    _keep(part.project, part.hash, part.offset, part.size, data)


def _keep(project: str, digest: str, offset: int, size: int, data: bytes) -> bool:
    """Write a part of a file. One that is complete, and is what its hash says, gets its name: True."""
    path = _received(project, digest)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(f"{path}.part", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "r+b") as file:
        file.seek(offset)
        file.write(data)
        _progress.add(len(data))
        if offset + len(data) < size:
            return False
        file.seek(0)
        is_whole = content.digest(file, None) == digest
        os.fsync(fd)
    if is_whole:
        os.replace(f"{path}.part", path)
    else:
        os.unlink(f"{path}.part")
    return is_whole


def _hold(project: str) -> None:
    """Have no other agent make copies of the project here, until ``_let_go`` or the end of this process.

    Raises:
        LaunchError: another one does, for longer than ``_OTHERS_S``.
    """
    if _lock:
        return
    _lock.append(os.open(os.path.join(project, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    deadline = time.monotonic() + _OTHERS_S
    while True:
        try:
            return fcntl.flock(_lock[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LaunchError("another command copies code of this project to this host") from None
        os.utime(_lock[0])  # The other agent sees that somebody waits.
        _progress.add()
        time.sleep(_LOOK_S)


def _others_wait() -> bool:
    """Whether another agent waits for this one to let the project go. In a thread: it may just do that."""
    with contextlib.suppress(IndexError, OSError):
        return time.time() - os.fstat(_lock[0]).st_mtime < PROGRESS_S
    return False


def _let_go() -> None:
    if _lock:
        os.close(_lock.pop())


class _State(NamedTuple):
    """What this host has of a snapshot.

    Attributes:
        found: what the marker says; None: that is absent itself.
        is_made: there is a copy.
        missing: paths that the copy lacks.
        sources: files with contents of the snapshot, by hash.
        absent: sizes of the files that must come from elsewhere, by hash.
    """

    found: Facts | None
    is_made: bool
    missing: Sequence[str]
    sources: Mapping[str, str]
    absent: Mapping[str, int]


def _answer(query: MakeCopy) -> CopyAnswer:
    _check_inside(query.cwd)
    if query.place:
        _beside[query.project] = placed.begin(query.place)
    project = _project(query.project)
    os.makedirs(project, mode=0o700, exist_ok=True)
    _hold(project)
    state = _look(query)
    if query.place and not state.is_made:
        placed.check(query.place, sum(state.absent.values()))
    if state.absent and query.source:
        state = _take(query, query.source, state)
    if state.absent or state.found is None:
        return _asking(query, state.absent)
    if query.place:
        placed.remove_parts(query.place)
    _make(query, state.found, state)
    return _placed(query, state.found) if query.place else _in_home(query, state.found)


def _placed(query: MakeCopy, found: Facts) -> CopyAnswer:
    project = _project(query.project)
    placed.put(os.path.join(project, query.name), query.place)
    shutil.rmtree(os.path.join(project, _RECEIVED), ignore_errors=True)
    _let_go()
    return CopyAnswer(links=tuple(work_folder.dangling(query.place, found)))


def _in_home(query: MakeCopy, found: Facts) -> CopyAnswer:
    project = _project(query.project)
    work = os.path.join(os.path.expanduser(HOME_BASE), "work", query.project)
    folder = os.path.join(project, query.name)
    before = work_folder.link(folder, work, query.cwd, found, query.sender, _progress.add)
    shutil.rmtree(os.path.join(project, _RECEIVED), ignore_errors=True)
    old_copies.delete_old(os.path.dirname(project))
    _let_go()
    other = before if before != query.sender else ""
    return CopyAnswer(links=tuple(work_folder.dangling(folder, found)), other_sender=quote(other))


def _look(query: MakeCopy) -> _State:
    project, marker = _project(query.project), _received(query.project, query.marker)
    folder = os.path.join(project, query.name)
    if is_made := os.path.exists(os.path.join(folder, MARKER)):
        os.utime(os.path.join(folder, MARKER))  # From now on nobody deletes it as an old one.
        found = copies.facts(folder)
        missing = copies.damaged(folder, found)
    elif os.path.exists(marker):
        found = _checked(marker)
        missing = list(found.files)
    else:
        return _State(None, is_made, (), {}, {query.marker: query.marker_bytes})
    sources = _sources(project, found)
    noted = (found.files[path] for path in missing)
    absent = {each[2]: each[0] for each in noted if len(each) > 1 and each[2] not in sources}
    return _State(found, is_made, missing, sources, absent)


def _take(query: MakeCopy, source: Source, state: _State) -> _State:
    """Take what is absent from another host, as far as it gives it: the marker first, which names the files."""

    def keep(digest: str, offset: int, data: bytes) -> bool:
        return _keep(query.project, digest, offset, state.absent[digest], data)

    with contextlib.suppress(OSError, ImportError):  # A Python may lack the module ssl.
        while state.absent:
            _progress.left = sum(state.absent.values())
            offsets = {digest: _wanted(query, digest, size).offset for digest, size in state.absent.items()}
            peers.take(source, {digest: (size, offsets[digest]) for digest, size in state.absent.items()}, keep)
            state = _look(query)
    return _look(query)


def _make(query: MakeCopy, found: Facts, state: _State) -> None:
    project, sources = _project(query.project), state.sources
    folder, received = os.path.join(project, query.name), os.path.join(project, _RECEIVED, "")
    uses = Counter(noted[2] for noted in found.files.values() if len(noted) > 1)

    def copy(path: str, noted: Sequence[Any], to: str) -> None:
        if uses[noted[2]] == 1 and sources[noted[2]].startswith(received):
            os.chmod(sources[noted[2]], noted[3])
            os.utime(sources[noted[2]], ns=(noted[1], noted[1]))
            if copies.linked(sources[noted[2]], noted, to):
                return
        with kept_files.open_regular(sources[noted[2]], os.O_NOFOLLOW) as source:
            copies.copy_of(source, path, noted, to)

    if state.is_made:
        copies.repair(folder, found, copy)
        return
    with open(_received(query.project, query.marker), "rb") as file:
        copies.build(folder, found, {MARKER: file.read()}, _newest(project), copy, on_file=_progress.add)


def _give(order: GiveFiles) -> Giving:
    folder = os.path.join(_project(order.project), order.name)
    files = {noted[2]: os.path.join(folder, path) for path, noted in copies.facts(folder).files.items() if noted[1:]}
    with open(marker := os.path.join(folder, MARKER), "rb") as file:
        files[content.hash_of(file.read())] = marker
    return peers.give(order, files)


@functools.lru_cache(1)
def _checked(marker: str) -> Facts:
    """What the marker says. Raises ValueError: it names a path outside of the snapshot."""
    with open(marker, "rb") as file:
        found = Facts(**json.loads(file.read()))
    for path in found.files:
        _check_inside(path or "/")
    return found


def _check_inside(path: str) -> None:
    """Raises ValueError: a path that is to be relative to the snapshot leads out of it."""
    if path and any(name in ("", ".", "..") for name in path.split("/")):
        raise ValueError(f"the snapshot names a file outside of it: {quote(path)}")


def _sources(project: str, found: Facts) -> dict[str, str]:
    """Files of this machine with contents of the snapshot, by hash: of the newest snapshot, and what has arrived."""
    sources: dict[str, str] = {}
    newest = _newest(project)
    with contextlib.suppress(LaunchError):
        for path, noted in copies.facts(newest).files.items():
            if len(noted) > 1 and copies.is_as_noted(os.path.join(newest, path), noted):
                sources[noted[2]] = os.path.join(newest, path)
    with contextlib.suppress(FileNotFoundError):
        folder = os.path.join(project, _RECEIVED)
        sources |= {name: os.path.join(folder, name) for name in os.listdir(folder) if not name.endswith(".part")}
    return sources


def _newest(project: str) -> str:
    """The snapshot of the project that was used last; empty if there is none."""
    markers = (os.path.join(entry.path, MARKER) for entry in os.scandir(project) if not entry.name.startswith("."))
    used = {marker: os.stat(marker).st_mtime for marker in markers if os.path.exists(marker)}
    return os.path.dirname(max(used, key=lambda marker: used[marker], default=""))


def _asking(query: MakeCopy, sizes: Mapping[str, int]) -> CopyAnswer:
    """Ask for the first of these files, by hash: for at most ``round_bytes`` of them, or the first part of one."""
    found, nbytes = list[Wanted](), 0
    for digest, size in sizes.items():
        wanted = _wanted(query, digest, size)
        nbytes += wanted.nbytes
        if found and (nbytes > query.round_bytes or len(found) == MAX_WANTED):
            break
        found.append(wanted)
    _progress.left = sum(sizes.values()) - sum(each.offset for each in found)
    return CopyAnswer(tuple(found), left=_progress.left)


def _wanted(query: MakeCopy, digest: str, size: int) -> Wanted:
    try:
        offset = os.stat(f"{_received(query.project, digest)}.part").st_size
    except FileNotFoundError:
        offset = 0
    offset = offset if offset < size else 0
    return Wanted(digest, offset, min(size - offset, query.round_bytes))
