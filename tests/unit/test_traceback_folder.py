"""Of one event that stops all ranks, the console shows one traceback and names the other ranks; the rest passes."""

from __future__ import annotations

import itertools
import re
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
from tests.support.configs import launch_config
from tests.support.watches import run_services


class Shown:
    """A folder, and what it has shown: (rank, bytes) and notes."""

    def __init__(self, *, is_plain: bool = False, folds_lost_peers: bool = True) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.attempts: list[tuple[int, bytes]] = []
        self.notes: list[str] = []
        self.lost_lines = 0
        self.console: Any = SimpleNamespace(is_plain=is_plain, show=self._note, flushes=[])
        messages: Any = SimpleNamespace(console=self.console, show=lambda text, _level: self._note(text))
        self.folder = TracebackFolder(messages, folds_lost_peers=folds_lost_peers)
        self._output = self.folder.on_output(self._take)

    def _note(self, text: str) -> None:
        self.notes.append(text.removeprefix("ddplaunch: "))

    def _take(self, header: Output, data: bytes) -> None:
        self.pieces.append((header.rank, data))
        self.attempts.append((header.attempt, data))
        self.lost_lines += header.lost_lines

    def write(
        self, rank: int, data: bytes, attempt: int = 0, stream: StreamName = "stderr", lost_lines: int = 0
    ) -> None:
        self._output(Output("node1", rank, rank, stream, len(data), attempt=attempt, lost_lines=lost_lines), data)

    def write_both(self, rank: int, stdout: bytes, stderr: bytes) -> None:
        runs = (len(stdout), len(stderr))
        self._output(Output("node1", rank, rank, "stdout", sum(runs), runs=runs), stdout + stderr)

    def text(self, rank: int) -> bytes:
        self.console.flushes[0]()
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


@pytest.mark.parametrize("with_prefix", [False, True])
def test_equal_tracebacks_are_shown_once(with_prefix: bool) -> None:
    shown = Shown()
    for rank in range(8):
        shown.write(rank, b"before\n" + raised(rank=rank if with_prefix else None) + b"after\n")
    assert shown.text(0) == b"before\n" + raised(rank=0 if with_prefix else None) + b"after\n"
    assert {shown.text(rank) for rank in range(1, 8)} == {b"before\nafter\n"}
    assert shown.notes == ["ranks 1-7: the same traceback (KeyError: 'lr')"]


def test_ctrl_c_interrupts_each_rank_elsewhere_and_is_one_event() -> None:
    shown = Shown()
    for rank in range(4):
        shown.write(rank, raised("KeyboardInterrupt", line=rank))
    assert shown.text(0) == raised("KeyboardInterrupt", line=0)
    assert [shown.text(rank) for rank in range(1, 4)] == [b"", b"", b""]
    assert shown.notes == ["ranks 1-3: the same traceback (KeyboardInterrupt)"]


LOST = "lost a peer or did not reach it; tracebacks are in the logs, and shown with -v"
GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:{}"
)
NCCL = """\
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or network error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketPollConnect: connect returned Connection refused"""


@pytest.mark.parametrize("exception", [GLOO, NCCL])
def test_ranks_that_have_lost_a_peer_are_named(exception: str) -> None:
    shown, verbose = Shown(), Shown(folds_lost_peers=False)
    for rank in (0, 2, 3):
        for each in (shown, verbose):
            each.write(rank, b"before\n" + raised(exception.format(rank)) + b"after\n")
    assert {shown.text(rank) for rank in (0, 2, 3)} == {b"before\nafter\n"}
    assert shown.notes == [f"ranks 0, 2-3 {LOST}"]
    assert verbose.text(0) == b"before\n" + raised(exception.format(0)) + b"after\n"


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


LINKS = (
    b"\nDuring handling of the above exception, another exception occurred:\n\n",
    b"\nThe above exception was the direct cause of the following exception:\n\n",
)


@pytest.mark.parametrize("link", LINKS, ids=["raised while handled", "raised from"])
def test_a_chain_is_folded_whole_or_not_at_all(link: bytes) -> None:
    lost, own = raised(GLOO), raised("ValueError: own")
    for chain in (lost + link + own, own + link + lost):
        shown = Shown()
        shown.write(0, chain + b"after\n")
        assert (shown.text(0), shown.notes) == (chain + b"after\n", [])
    shown = Shown()
    shown.write(0, lost + link[:9])
    shown.write(0, link[9:] + lost)
    assert shown.text(0) == b""


def test_many_tracebacks_in_one_piece_are_passed_on_as_they_are() -> None:
    """Each is looked at by itself: what follows it would be searched again and again."""
    shown, data = Shown(), b"".join(raised(f"KeyError: {number}") for number in range(5000))
    shown.write(0, data)
    assert shown.text(0) == data


def test_stdout_does_not_overtake_a_traceback_of_its_rank() -> None:
    shown = Shown()
    shown.write(0, raised())
    shown.write(0, b"next\n", stream="stdout")
    assert [data for _, data in shown.pieces] == [raised(), b"next\n"]


def test_lines_of_both_streams_do_not_overtake_a_traceback_of_their_rank() -> None:
    shown, half = Shown(), raised()[:60]
    shown.write(0, half)
    shown.write_both(0, b"next\n", b"more\n")
    assert [data for _, data in shown.pieces] == [half, b"next\n", b"more\n"]


def test_lines_that_were_lost_while_a_traceback_is_held_are_told() -> None:
    shown = Shown()
    shown.write(0, raised()[:60], lost_lines=2)
    shown.write(0, raised()[60:], lost_lines=3)
    shown.text(0)
    assert shown.lost_lines == 5


def test_a_script_that_cannot_reach_a_server_has_lost_no_peer() -> None:
    text = raised("ConnectionRefusedError: [Errno 111] Connection refused")
    shown = Shown()
    shown.write(0, text)
    assert shown.text(0) == text


def test_other_tracebacks_are_all_shown() -> None:
    shown = Shown()
    shown.write(0, raised())
    shown.write(0, raised())
    shown.write(1, raised(line=5))
    shown.write(2, raised("ValueError"))
    shown.write(1, raised(), attempt=1)
    assert [shown.text(rank) for rank in range(3)] == [raised() * 2, raised(line=5) + raised(), raised("ValueError")]
    assert shown.notes == []


def test_of_a_chain_each_traceback_is_folded() -> None:
    chain = raised("KeyError: 1") + LINKS[0] + raised()
    shown = Shown()
    shown.write(0, chain)
    shown.write(1, chain)
    assert (shown.text(0), b"Traceback" in shown.text(1)) == (chain, False)


def test_a_traceback_that_does_not_end_is_shown_in_time() -> None:
    shown = Shown()
    shown.write(0, raised()[:60])
    assert shown.pieces == []
    assert shown.text(0) == raised()[:60]
    shown.write(0, raised()[60:])
    assert shown.text(0) == raised()


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
    assert not re.search("same", "".join(shown.notes))


@pytest.mark.usefixtures("no_threads")
def test_without_a_thread_for_the_timer_nothing_is_held_back() -> None:
    shown, half = Shown(), raised()[:40]
    shown.write(0, half)
    assert shown.pieces == [(0, half)]


def test_the_beginning_of_a_traceback_stays_with_its_attempt() -> None:
    """The rank of the next attempt may be on another node, whose output would be shown as this one's."""
    shown, begin = Shown(), raised()[:60]
    shown.write(3, begin)
    shown.write(3, b"step 1\n", attempt=1)
    shown.folder.flush()
    assert sorted(shown.attempts) == [(0, begin), (1, b"step 1\n")]


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_a_success_in_spite_of_an_exception_in_a_thread_is_said_to_be_one(outcome: Any) -> None:
    """Only of the last attempt, and not of a line that only has these words."""
    shown, begin = Shown(is_plain=True), b"Exception in thread Thread-1 (f):\n"
    shown.write(4, begin)
    shown.write(2, b"before\n" + begin + raised(), attempt=1)
    shown.write_both(1, b"before\n", begin)
    shown.write(1, begin, attempt=1)
    shown.write(3, b"> " + begin, attempt=1)
    result = RunResult("job7", 0, outcome, 1.0, tuple(AttemptResult(number, outcome, (), 1.0) for number in range(2)))
    shown.folder.on_run_ended(RunEnd(result, None, {}, lambda: False))
    text = "ranks 1-2: a thread ended with an exception; the exit code is that of the main thread"
    assert shown.notes == [text] * (outcome == "succeeded")


def test_stdout_and_a_lone_worker_are_shown_at_once() -> None:
    shown, alone = Shown(), Shown(is_plain=True)
    shown.write(0, raised()[:60], stream="stdout")
    alone.write(0, raised()[:60])
    assert shown.pieces == alone.pieces == [(0, raised()[:60])]
