"""CUDA streams and events for fake GPUs, where every operation has finished when its call returns.

Runs in a worker of a dry run; patches nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from ddplaunch.features.dry_run.fake_cuda.devices import Device, FakeDevices
from ddplaunch.features.dry_run.fake_cuda.unsupported import unsupported_function

if TYPE_CHECKING:
    import torch


_thread = threading.local()
_numbers = itertools.count(1)


class _Finished:
    """What has no pending work."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Event(_Finished):
    """Complete as soon as it is recorded; elapsed times are real times of the CPU."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._time_s = 0.0
        self.cuda_event = self.event_id = next(_numbers)

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._time_s - self._time_s) * 1000.0

    def wait(self, stream: Any = None) -> None:
        pass

    ipc_handle = unsupported_function("torch.cuda.Event.ipc_handle")
    from_ipc_handle = staticmethod(unsupported_function("torch.cuda.Event.from_ipc_handle"))


class Stream(_Finished):
    """A stream without pending work. ``Streams`` sets ``devices`` in the subclass for ``torch.cuda.Stream``."""

    devices: FakeDevices

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: Any) -> None:
        self.device_index = self.devices.index(device)
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_numbers)
        self.device_type = 1

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    @property
    def device(self) -> torch.device:
        return Device("cuda", self.device_index)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *_error: object) -> None:
        _stack().pop()


class StreamContext:
    """The context manager that ``torch.cuda.stream(s)`` returns; no effect if ``s`` is None."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


class Streams:
    """Stream functions of ``torch.cuda``: default and current stream by GPU and thread."""

    def __init__(self, devices: FakeDevices) -> None:
        self._devices = devices
        self.Stream = type("Stream", (Stream,), {"devices": devices, "__module__": "torch.cuda"})
        self._default: dict[int, Stream] = {}

    def default_stream(self, device: Any = None) -> Stream:
        index = self._devices.index(device)
        if index not in self._default:
            self._default[index] = self.Stream(index)
            self._default[index].stream_id = self._default[index].cuda_stream = 0
        return self._default[index]

    def current_stream(self, device: Any = None) -> Stream:
        index = self._devices.index(device)
        return next(
            (entered for entered in reversed(_stack()) if entered.device_index == index), self.default_stream(index)
        )

    def set_stream(self, stream: Stream | None) -> None:
        if stream is not None:
            _stack()[:] = [stream]


def _stack() -> list[Stream]:
    if not hasattr(_thread, "stack"):
        _thread.stack = []
    stack: list[Stream] = _thread.stack
    return stack
