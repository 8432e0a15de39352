"""What a process manager may answer to the tasks of an mpirun; tests/ssh/test_mpi.py has real ones."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

import pytest

from ddplaunch.features.other_schedulers import endpoint_exchange
from ddplaunch.features.other_schedulers.endpoint_exchange import exchange
from ddplaunch.features.other_schedulers.readers import open_mpi
from ddplaunch.features.schedulers.info import candidate_ports

ANSWERS = (
    "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "cmd=my_kvsname kvsname=kvs_7",
    "cmd=put_result rc=0 msg=success",
    "cmd=barrier_out",
    "cmd=get_result rc=0 msg=success value=10.0.0.1,fd00::1",
    "cmd=finalize_ack",
)


def ask(
    answers: Sequence[str], addresses: tuple[str, ...] | None = ("10.0.0.1", "fd00::1")
) -> tuple[object, list[str]]:
    """The result of an exchange with a process manager that gives ``answers`` and hangs up, and what it was asked."""
    own, other = socket.socketpair()
    asked: list[str] = []

    def serve() -> None:
        with other, contextlib.suppress(OSError), other.makefile("rwb", buffering=0) as stream:
            for answer in answers:
                asked.append(stream.readline().decode().rstrip("\n"))
                stream.write(answer.encode() + b"\n")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return exchange({"PMI_FD": str(own.detach())}, addresses), asked
    except OSError as error:
        return str(error), asked
    finally:
        thread.join()


@pytest.mark.parametrize(
    ("number", "answer", "error"),
    [
        (0, "cmd=response_to_init rc=-1", "PMI: init failed"),
        (4, "cmd=get_result rc=-1 msg=unknown_key", "PMI: get failed"),
        (4, "cmd=get_result rc=0 value=evil.example;rm", "rank 0 gave no addresses"),
        (4, "\xff" * 9000, "rank 0 gave no addresses"),
    ],
)
def test_a_strange_answer_is_an_error(number: int, answer: str, error: str):
    assert ask([*ANSWERS[:number], answer, *ANSWERS[number + 1 :]])[0] == error


def test_a_manager_that_hangs_up_is_an_error():
    error, asked = ask(ANSWERS[:3])  # By an end of the stream, a broken pipe or a reset connection.
    assert isinstance(error, str)
    assert len(asked) == 3


def test_tasks_that_do_not_come_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint_exchange, "LIMIT_S", 0.1)
    own, other = socket.socketpair()
    with other, pytest.raises(OSError, match=r"not all tasks have started ddplaunch within 0.1 s"):
        exchange({"PMI_FD": str(own.detach())}, None)


@pytest.mark.parametrize(
    "environ", [{}, {"PMI_FD": "-1"}, {"PMI_FD": "x"}, {"PMI_FD": "0"}, {"PMI_FD": "9999"}, {"PMI_PORT": "vm:1"}]
)
def test_without_a_process_manager_there_is_no_exchange(environ: dict[str, str]):
    assert exchange(environ, None) is None


def test_what_the_variables_name_counts_more_than_what_is_exchanged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint_exchange, "exchange", lambda *_: ("run", ("10.0.0.1", "10.0.0.2")))
    counts = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    environ = {f"OMPI_COMM_WORLD_{name}": count for name, count in counts.items()}
    bare = open_mpi(environ)
    assert bare.find_endpoint
    found = bare.find_endpoint(bare)
    assert (found.first_host, found.other_addresses, found.token) == ("10.0.0.1", ("10.0.0.2",), "mpi-run")
    assert found.ports == candidate_ports("mpi-run")
    named = open_mpi({**environ, "MASTER_ADDR": "gpu1"})
    assert named.find_endpoint
    assert named.find_endpoint(named).first_host == "gpu1"
