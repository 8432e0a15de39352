"""The stub of torch answers as the real torch does: the same calls on both, side by side."""

from __future__ import annotations

import importlib
import importlib.util
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from inspect import signature
from types import ModuleType
from typing import Any

import pytest

from ddplaunch.rendezvous.plain_store import PlainStore
from tests.support.installed_stub import STUBS


def load_stub() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stub_of_torch_distributed", STUBS / "torch" / "distributed.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stub = load_stub()


class Place:
    """A store of one kind, which listens only when it is served."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def serve(self) -> Any:
        fd = self._listener.detach()
        return self._kind("127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=fd)

    def client(self, timeout_s: float = 20.0) -> Any:
        timeout = timedelta(seconds=timeout_s)
        return self._kind("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def real() -> ModuleType:
    """Not imported where tests are only collected."""
    return importlib.import_module("torch.distributed")


@pytest.fixture(params=["torch", "stub"])
def place(request: pytest.FixtureRequest, real: ModuleType) -> Iterator[Place]:
    place = Place(real.TCPStore if request.param == "torch" else stub.TCPStore)
    yield place
    place.close()


def test_a_store_is_made_with_the_same_arguments(real: ModuleType) -> None:
    text = real.TCPStore.__init__.__doc__ or ""
    theirs = re.findall(r"(\w+): ", text.partition("(self: ")[2].partition("->")[0])
    assert theirs == list(signature(stub.TCPStore).parameters)


def test_the_stub_has_nothing_that_torch_does_not_have(real: ModuleType) -> None:
    for name in vars(stub.TCPStore):
        assert name.startswith("_") or hasattr(real.TCPStore, name), name
    assert issubclass(real.DistNetworkError, RuntimeError)
    assert issubclass(real.DistStoreError, RuntimeError)
    assert callable(real_torch_generator_seed())


def real_torch_generator_seed() -> Any:
    import torch

    return torch.default_generator.seed


def test_values_are_kept_counted_and_compared(place: Place) -> None:
    server = place.serve()
    client = place.client()
    server.set("greeting", '{"a": 1}')
    assert client.get("greeting") == b'{"a": 1}'
    assert [client.add("count", 1), server.add("count", 2), client.add("count", 0)] == [1, 3, 3]
    assert client.get("count") == b"3"
    assert client.compare_set("place", "", "mine") == b"mine"
    assert server.compare_set("place", "", "yours") == b"mine"
    assert server.compare_set("place", "mine", "ours") == b"ours"
    assert client.compare_set("elsewhere", "expected", "x") == b"expected"
    client.multi_set(["one", "two"], ["1", "2"])
    assert (server.get("one"), server.get("two")) == (b"1", b"2")
    answers = [server.check(keys) for keys in (["one", "two"], ["one", "three"], ["elsewhere"])]
    assert answers == [True, False, False]


def test_what_ddplaunch_says_without_torch_is_understood(place: Place) -> None:
    server = place.serve()
    server.set("open", "greeting")
    with PlainStore("127.0.0.1", place.port) as store:
        assert (store.check("open"), store.check("closed")) == (True, False)
        assert store.get("open") == b"greeting"
        assert [store.add("count", 1), store.add("count", 1)] == [1, 2]
        store.set("box/2", '{"a": 1}')
    assert (server.get("count"), server.get("box/2")) == (b"2", b'{"a": 1}')
    assert place.client().get("box/2") == b'{"a": 1}'


def test_a_value_that_is_not_there_is_waited_for_by_one_client_alone(place: Place) -> None:
    server = place.serve()
    client = place.client()
    threading.Timer(0.2, server.set, ("late", "there")).start()
    assert client.clone().get("late") == b"there"


def test_waiting_has_an_end(place: Place) -> None:
    server = place.serve()
    client = place.client()
    client.set_timeout(timedelta(seconds=1))
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"wait timeout after 1000ms, keys: /never"):
        client.get("never")
    assert 0.9 < time.monotonic() - started_s < 10
    assert client.add("alive", 1) == server.add("alive", 0) == 1


def test_a_store_that_is_served_later_is_waited_for(place: Place) -> None:
    servers: list[Any] = []
    timer = threading.Timer(0.3, lambda: servers.append(place.serve()))
    timer.start()
    client = place.client()
    timer.join()
    client.set("a", "b")
    assert servers[0].get("a") == b"b"


def test_where_nothing_listens_is_an_error_in_time(place: Place) -> None:
    place.close()
    with pytest.raises(RuntimeError):
        place.client(timeout_s=1)
