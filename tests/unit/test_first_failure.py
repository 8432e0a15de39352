"""Of many exits the one that explains the others is named first, and its code is a shell's."""

from __future__ import annotations

import itertools
import random
import signal
from typing import Any

import pytest

from ddplaunch.protocol import first_failure
from ddplaunch.protocol.results import WorkerError, WorkerExit
from tests.support import golden


def ended(rank: int, returncode: int = 1, time_s: float = 100.0, message: str = "", **more: Any) -> WorkerExit:
    error = WorkerError(message, more.pop("traceback", "Traceback ..."), time_s) if message else None
    values = {"local_rank": rank, "host": "node1", "pid": 1000 + rank, "stopped": False, "duration_s": 1.0, **more}
    return WorkerExit(rank=rank, returncode=returncode, time_s=time_s, error=error, **values)


OWN = "RuntimeError: CUDA out of memory"
PEER_GONE = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
    "RuntimeError: Gloo connectFullMesh failed with [...] timed out connecting",
    "torch.distributed.DistBackendError: NCCL error: remote process exited or network error, ncclRemoteError",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1",
    "DistNetworkError: failed to recv, got 0 bytes",
    "DistStoreError: wait timeout after 300000ms",
    "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
)


def test_no_failure_is_no_failure() -> None:
    assert first_failure.first_failure([]) is None
    assert first_failure.first_failure([ended(0, 0), ended(1, 0)]) is None
    assert first_failure.failures([ended(0, -15, stopped=True), ended(1, 1, stopped=True)]) == []


def test_the_earliest_failure_is_the_first() -> None:
    """torchrun: errors_api_test 4."""
    exits = [ended(0, 1, 103.0), ended(1, -9, 101.0), ended(2, 0, 99.0), ended(3, 7, 102.0)]
    assert [exit_.rank for exit_ in first_failure.failures(exits)] == [1, 3, 0]


def test_who_was_only_stopped_is_never_to_blame() -> None:
    exits = [
        ended(0, -15, 99.0, stopped=True),
        ended(1, 1, 100.0),
        ended(2, 1, 98.0, "E: on its way out", stopped=True),
    ]
    assert first_failure.failures(exits) == [exits[1]]


@pytest.mark.parametrize("message", PEER_GONE)
def test_who_lost_a_peer_comes_after_who_failed_alone_even_if_it_told_earlier(message: str) -> None:
    silent, told = ended(2, -9, 100.5), ended(3, 1, 100.6, OWN)
    exits = [ended(0, 1, 100.1, message), told, ended(1, 1, 100.0, message), silent]
    assert [exit_.rank for exit_ in first_failure.failures(exits)] == [2, 3, 1, 0]
    assert first_failure.is_consequence(exits[0])
    assert not first_failure.is_consequence(silent)
    assert not first_failure.is_consequence(told)


def test_a_lost_peer_is_the_cause_where_there_is_no_other() -> None:
    first = first_failure.first_failure([ended(1, 1, 100.0, PEER_GONE[0]), ended(0, -15, 100.1, stopped=True)])
    assert first
    assert first.rank == 1


def test_the_order_of_the_exits_does_not_matter() -> None:
    exits = [ended(0, 1, 100.0), ended(1, 1, 100.0), ended(2, 1, 100.0, PEER_GONE[0]), ended(3, 0), ended(4, -6, 99.0)]
    orders = {tuple(exit_.rank for exit_ in first_failure.failures(order)) for order in itertools.permutations(exits)}
    assert orders == {(4, 0, 1, 2)}


def test_many_exits_are_judged_at_once() -> None:
    exits = [ended(rank, -15, 200.0, stopped=True) for rank in range(4000)]
    exits[1234] = ended(1234, 3, 150.0)
    random.Random(0).shuffle(exits)
    first = first_failure.first_failure(exits)
    assert first
    assert first.rank == 1234


def test_an_end_has_the_exit_code_of_a_shell_and_is_told_by_name() -> None:
    def told(returncode: str) -> str:
        number = int(returncode)
        code = first_failure.exit_code(ended(0, number))
        return f"{code}, {first_failure.describe(number)}: the worker {first_failure.ended(number)}"

    golden.check_answers("ends", told)


def test_every_signal_has_words() -> None:
    for number in signal.valid_signals():
        assert first_failure.describe(-number)


@pytest.mark.parametrize("asked", ["give_up", "avoid_node"])
def test_who_has_asked_for_something_is_named_before_all_others(asked: str) -> None:
    exits = [ended(0, 1, 99.0, OWN), ended(1, 1, 98.0, PEER_GONE[0]), ended(2, 1, 101.0, PEER_GONE[0], **{asked: "no"})]
    assert [exit_.rank for exit_ in first_failure.failures(exits)] == [2, 0, 1]
    assert not first_failure.is_consequence(exits[2])
