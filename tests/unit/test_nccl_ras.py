"""What the client of NCCL's RAS asks and gets, from a server on loopback; and which address the workers get."""

from __future__ import annotations

import socket
import time

import pytest

from ddplaunch.features.hangs import nccl_ras
from ddplaunch.features.hangs.nccl_ras import CUT, ask, own_address
from tests.support.fake_ras import HEALTHY_TEXT, Behaviour, as_json, fake_ras, rank

STATUS = as_json([rank(0), rank(1)])


def test_a_new_version_answers_in_json() -> None:
    with fake_ras(json=STATUS) as server:
        assert ask(server.address) == (STATUS, "")
        assert server.commands == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]


def test_an_old_version_answers_in_text() -> None:
    with fake_ras(knows_json=False) as server:
        assert ask(server.address) == (HEALTHY_TEXT, "")


def test_where_nobody_listens_the_reason_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answer, missing = ask(f"127.0.0.1:{port}")
    assert answer == ""
    assert missing.startswith(f"nobody listens at 127.0.0.1:{port}: no worker here has a communicator")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("silent", "does not answer: its process may be suspended"),
        ("rubbish", "is not NCCL's RAS"),
        ("mute", "sent no answer"),
    ],
)
def test_a_server_without_an_answer_is_a_reason_in_time(behaviour: Behaviour, reason: str) -> None:
    started = time.monotonic()
    with fake_ras(behaviour=behaviour) as server:
        answer, missing = ask(server.address, limit_s=1.0)
    assert answer == ""
    assert reason in missing
    assert time.monotonic() - started < 5


def test_a_suspended_process_is_passed_over() -> None:
    with fake_ras(json=STATUS, silent_connections=2) as server:
        assert ask(server.address) == (STATUS, "")


def test_an_answer_that_is_cut_is_kept_and_marked() -> None:
    with fake_ras(json=STATUS, behaviour="cut") as server:
        assert ask(server.address) == (STATUS[: len(STATUS) // 2], "")


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MAX_ANSWER_BYTES", 100_000)
    with fake_ras(json=STATUS, behaviour="huge") as server:
        answer, missing = ask(server.address)
    assert (len(answer), missing) == (100_000, CUT)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "localhost:x", ":1", "h:0", "h:65536", "\x1b:1"])
def test_an_address_that_is_none_is_a_reason(address: str) -> None:
    answer, missing = ask(address, limit_s=1.0)
    assert answer == ""
    assert missing.isprintable()
    assert missing


# The address of a run.


def test_each_run_has_its_own_address_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras.devices, "has_nvml", lambda: True)
    addresses = [own_address({})["NCCL_RAS_ADDR"] for _ in range(2)]
    for address in addresses:
        host, _, port = address.partition(":")
        assert host == "127.0.0.1"
        socket.create_server((host, int(port))).close()


@pytest.mark.parametrize(
    "environ", [{"NCCL_RAS_ADDR": "localhost:28028"}, {"NCCL_RAS_ADDR": ""}, {"NCCL_RAS_ENABLE": "0"}]
)
def test_what_the_user_has_set_stays(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras.devices, "has_nvml", lambda: True)
    assert own_address(environ) == {}


@pytest.mark.parametrize("value", ["1", "", "yes", "2"])
def test_only_zero_turns_it_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras.devices, "has_nvml", lambda: True)
    assert own_address({"NCCL_RAS_ENABLE": value})


def test_without_gpus_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras.devices, "has_nvml", lambda: False)
    monkeypatch.setattr(nccl_ras, "_NVIDIA_DEVICE", "/nonexistent")
    assert own_address({}) == {}


def test_the_device_of_the_driver_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras.devices, "has_nvml", lambda: False)
    monkeypatch.setattr(nccl_ras, "_NVIDIA_DEVICE", "/dev/null")
    assert own_address({})
