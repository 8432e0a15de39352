"""Works of process groups: what a collective or a message returns, with all that NCCL's works can.

Runs in a worker of a dry run. A work that nobody waits for is kept here until it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class JointWork(dist.Work):
    """Several works as one, with all that NCCL's works can. ``finish`` runs once, when all have ended.

    Waits once for each of ``works``: gloo would wait for ever for a message that somebody has waited for.
    """

    def __init__(
        self, works: Sequence[Any], outputs: Iterable[torch.Tensor] = (), finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self._works, self._outputs, self._finish = list(works), list(outputs), finish
        self._source = self._works[0] if self._works else None
        self._waits, self._finishes = threading.Lock(), threading.Lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, *timeout: Any) -> bool:
        try:
            with self._waits:
                while self._works:
                    self._works[0].wait(*timeout)
                    del self._works[0]
            self._finish_once()
        finally:
            _unfinished.pop(self, None)  # A failure that is raised here is not one of the next collective.
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return not self._works or self.get_future().done()

    def has_ended(self) -> bool:
        """Costs no thread, unlike ``is_completed``. Always False for a message that nobody has waited for."""
        return all(getattr(work, "has_ended", work.is_completed)() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and all(work.is_success() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return int(self._source._source_rank())  # type: ignore[union-attr]

    _source_rank = source_rank

    def get_future_result(self) -> torch.futures.Future[int]:
        return self.get_future().then(lambda ended: 0 * len(ended.value()))  # SUCCESS, or the exception.

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._future = self._future or self._start_future()
        return self._future

    def _start_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def finished(all_ended: Any) -> list[torch.Tensor]:
            all_ended.wait()
            self._finish_once()  # Not `wait`: gloo's thread, which runs this, has yet to end the works.
            return self._outputs

        try:
            futures = [work.get_future() for work in self._works]
        except RuntimeError:  # Gloo's works of messages between two ranks have no future.
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            threading.Thread(target=self._complete, args=(future,), daemon=True).start()
            return future
        return torch.futures.collect_all(futures).then(finished)

    def _finish_once(self) -> None:
        with self._finishes:
            finish, self._finish = self._finish, None
            if finish:
                finish()
        _unfinished.pop(self, None)

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        """Runs in a thread of its own."""
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)


_unfinished: dict[JointWork, Any] = {}
"""Works that nobody has waited for yet, oldest first -> their group; None for a message between two ranks.

Without a reference, gloo would take a message back, and ``finish`` would never run.
"""


def wait_for_all(group: Any = None) -> None:
    """Wait for all works that were started, as a GPU that is synchronized; or for all collectives of ``group``."""
    for work, of_group in list(_unfinished.items()):
        if group is None or of_group is group:
            work.wait()


def keep(work: JointWork, group: Any) -> None:
    """Keep ``work`` until it has finished, and finish older ones that have ended."""
    for older in list(_unfinished):
        if not older.has_ended():
            break
        _unfinished.pop(older, None)  # Also if it has failed.
        older.wait()
    _unfinished[work] = group


class FromItself:
    """The receipt of a message of this rank to itself, with the methods of a work that ``JointWork`` uses."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        """``targets``: flat tensors, into which the message goes."""
        self._targets, self._is_there = targets, threading.Event()

    def take(self, sent: Sequence[torch.Tensor]) -> None:
        """The message has been sent."""
        for target, values in zip(self._targets, sent, strict=True):
            target.copy_(values)
        self._is_there.set()

    def is_completed(self) -> bool:
        return self._is_there.is_set()

    is_success = is_completed

    def wait(self, *_timeout: Any) -> None:
        """Raises RuntimeError in the main thread, which would wait for itself for ever."""
        if threading.current_thread() is not threading.main_thread():
            self._is_there.wait()
        elif not self._is_there.is_set():
            raise RuntimeError("this rank waits for a message to itself that it has not sent")

    def get_future(self) -> Any:
        raise RuntimeError("a message has none")  # As those of gloo.
