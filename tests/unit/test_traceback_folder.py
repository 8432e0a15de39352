"""Of one event that stops all ranks, the console shows one traceback and names the other ranks; the rest passes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.features.tracebacks.launcher import TracebackFolder, watches
from ddplaunch.launcher.watches import RunEnd
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.results import AttemptResult, StreamName
from ddplaunch.protocol.run_result import RunResult
from tests.support import golden
from tests.support.configs import launch_config
from tests.support.watches import run_services


class Shown:
    """A folder of tracebacks, and what it has passed on. The methods are the steps of a story.

    Words of a story stand for lines: those of ``TEXTS``, or the word itself. ``said`` has (attempt, rank, bytes).
    """

    def __init__(self, kind: str = "") -> None:
        """``kind``: a ``lone`` worker, or with the option ``-v``."""
        self.said: list[str] = []
        self.pieces: list[tuple[int, bytes]] = []
        self.console: Any = SimpleNamespace(is_plain=kind == "lone", show=self._note, flushes=[])
        messages: Any = SimpleNamespace(console=self.console, show=lambda text, _level: self._note(text))
        self.folder = TracebackFolder(messages, folds_lost_peers=kind != "-v")
        self._output = self.folder.on_output(self._take)

    def _note(self, text: str) -> None:
        self.said.append(f"note: {text}")

    def _take(self, header: Output, data: bytes) -> None:
        self.pieces.append((header.rank, data))
        lost = f"{header.lost_lines} lost lines, " if header.lost_lines else ""
        self.said.append(f"attempt {header.attempt}, rank {header.rank}: {lost}{in_words(data, header.rank)}")

    def write(self, rank: int | str, data: bytes, **fields: Any) -> None:
        stream: StreamName = fields.pop("stream", "stderr")
        self._output(Output("node1", int(rank), int(rank), stream, len(data), **fields), data)

    def err(self, rank: str, *words: str) -> None:
        self.write(rank, of_words(words, int(rank)))

    def out(self, rank: str, *words: str) -> None:
        self.write(rank, of_words(words, int(rank)), stream="stdout")

    def next(self, rank: str, *words: str) -> None:
        """In the next attempt."""
        self.write(rank, of_words(words, int(rank)), attempt=1)

    def lost(self, rank: str, lines: str, *words: str) -> None:
        """So many lines before it were lost."""
        self.write(rank, of_words(words, int(rank)), lost_lines=int(lines))

    def both(self, rank: str, stdout: str, stderr: str, attempt: str = "0") -> None:
        """A line of stdout, and one of stderr."""
        first, second = (of_words([word], int(rank)) for word in (stdout, stderr))
        runs = (len(first), len(second))
        self.write(rank, first + second, stream="stdout", attempt=int(attempt), runs=runs)

    def flush(self) -> None:
        self.console.flushes[0]()

    def ends(self, outcome: Any) -> None:
        """The run, with its second attempt."""
        attempts = tuple(AttemptResult(number, outcome, (), 1.0) for number in range(2))
        self.folder.on_run_ended(RunEnd(RunResult("job7", 0, outcome, 1.0, attempts), None, {}, lambda: False))

    def text(self, rank: int) -> bytes:
        self.flush()
        return b"".join(data for owner, data in self.pieces if owner == rank)


def raised(exception: str = "KeyError: 'lr'", rank: int | None = None, line: int = 4) -> bytes:
    lines = [
        "Traceback (most recent call last):",
        f'  File "train.py", line {line}, in f',
        "    x = a[b]",
        "  ~~^^",
        exception,
    ]
    prefix = "" if rank is None else f"[rank{rank}]: "
    return "".join(f"{prefix}{text}\n" for text in lines).encode()


GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:{}"
)
NCCL = """\
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or network error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketPollConnect: connect returned Connection refused"""
LINKS = (
    b"\nDuring handling of the above exception, another exception occurred:\n\n",
    b"\nThe above exception was the direct cause of the following exception:\n\n",
)


TEXTS = {
    "<traceback>": raised(),
    "<traceback,line5>": raised(line=5),
    "<ValueError>": raised("ValueError"),
    "<interrupted>": raised("KeyboardInterrupt"),
    "<refused>": raised("ConnectionRefusedError: [Errno 111] Connection refused"),
    "<gloo>": raised(GLOO),
    "<NCCL>": raised(NCCL),
    "<handling>": LINKS[0],
    "<handl": LINKS[0][:9],
    "ing>": LINKS[0][9:],
    "<cause>": LINKS[1],
    "<half": raised()[:60],
    "half>": raised()[60:],
    "<thread>": b"Exception in thread Thread-1 (f):\n",
    "<quoted>": b"> Exception in thread Thread-1 (f):\n",
}


def texts_of(rank: int) -> dict[str, bytes]:
    """With those that have the rank in front of each line, or in the message."""
    own = {"<ranked>": raised(rank=rank), "<gloo>": raised(GLOO.format(rank))}
    return TEXTS | own


def of_words(words: Iterable[str], rank: int) -> bytes:
    return b"".join(texts_of(rank).get(word, f"{word}\n".encode()) for word in words)


def in_words(data: bytes, rank: int) -> str:
    """The longest texts are recognised first."""
    for word, text in sorted(texts_of(rank).items(), key=lambda each: -len(each[1])):
        data = data.replace(text, f"{word}\n".encode())
    return " ".join(data.decode().split("\n")).rstrip()


def test_what_is_shown_of_tracebacks() -> None:
    """A story is a sentence, perhaps ``lone`` or ``-v``, and steps."""

    def story(text: str) -> str:
        _, *kind, steps = text.split(": ")
        return golden.play(Shown(*kind), steps)

    golden.check_pages("tracebacks", story)


@pytest.mark.parametrize(
    ("settings", "is_folded"),
    [({}, True), ({"verbosity": 1}, False), ({"log_dir": "/dev/null"}, False)],
)
def test_tracebacks_of_lost_peers_are_folded_where_log_files_have_them(
    settings: dict[str, Any], is_folded: bool
) -> None:
    shown, config = Shown(), launch_config(script="x.py", **settings)
    (folder,) = watches(run_services(config, messages=SimpleNamespace(console=shown.console)))
    folder.on_output(shown._take)(Output("node1", 0, 0, "stderr", 0), raised(GLOO))
    folder.flush()
    assert (shown.pieces == []) is is_folded


def test_what_belongs_to_a_lost_peer_is_folded_in_whatever_pieces_it_comes() -> None:
    data = raised(NCCL, rank=1) + b"after\n"
    for cut in range(data.index(b"\n") + 1, len(data)):
        shown = Shown()
        shown.write(1, data[:cut])
        shown.write(1, data[cut:])
        assert shown.text(1) == b"after\n", data[:cut]


def test_many_tracebacks_in_one_piece_are_passed_on_as_they_are() -> None:
    """Each is looked at by itself: what follows it would be searched again and again."""
    shown, data = Shown(), b"".join(raised(f"KeyError: {number}") for number in range(5000))
    shown.write(0, data)
    assert shown.text(0) == data


@given(st.lists(st.integers(0, 400), max_size=5), st.sampled_from([b"\n", b"\r\n", b""]))
def test_one_ranks_bytes_are_passed_on_in_whatever_pieces_they_come(cuts: list[int], end: bytes) -> None:
    data = (
        b"  + Exception Group Traceback (most recent call last):\n"
        + raised()
        + b"more"
        + end
        + raised(rank=3)
        + b"Traceback"
    )
    shown = Shown()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, stop in itertools.pairwise(places):
        shown.write(3, data[start:stop])
    assert shown.text(3) == data
    assert not re.search("same", "".join(shown.said))


@pytest.mark.usefixtures("no_threads")
def test_without_a_thread_for_the_timer_nothing_is_held_back() -> None:
    shown, half = Shown(), raised()[:40]
    shown.write(0, half)
    assert shown.pieces == [(0, half)]
