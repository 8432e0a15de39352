"""The parts of a worker: what features do before the script and at its end.

Runs in the worker. A feature's module ``worker`` is imported only if the agent has a text for it (``Part.for_worker``),
and by the forkserver. It must import little: a worker starts with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

from ddplaunch import features

if TYPE_CHECKING:
    import socket


class WorkerPart:
    """One part of a worker. A method that a part does not define does nothing. Methods run in the main thread.

    Attributes:
        function: what runs in place of a script; None if this part has no such thing.
    """

    function: Callable[[], object] | None = None

    def before_script(self) -> None:
        """The script is next; its folder is in ``sys.path``."""

    def on_script_ended(self) -> None:
        """The script has ended in any way. Also called in a child that it has forked."""

    def on_error(self, error: BaseException, folder: str) -> None:
        """The script has not caught ``error``. ``folder`` is the worker's for files; empty: it has none.

        Like ``on_error_shown`` not called in a child that the script has forked.
        """

    def on_error_shown(self, error: BaseException) -> None:
        """The traceback of ``error`` has been printed; this process ends next."""


def connect(socket_name: str, feature: str) -> socket.socket:
    """Connect to the agent's socket for workers; the part of ``feature`` in the agent takes the connection.

    ``socket_name``: what ``open`` of ``NodeServices.worker_socket`` has returned there; a text of that part has it.
    Any thread; the caller closes the connection.

    Raises:
        OSError: the agent has gone.
    """
    import socket

    with contextlib.ExitStack() as on_error:
        connection = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.bind(features.worker_address(feature))
        connection.connect(f"\0{socket_name}")
        on_error.pop_all()
    return connection


def load(environ: MutableMapping[str, str]) -> tuple[WorkerPart, ...]:
    """The parts of this worker, in the order of ``FEATURES``. Removes the variables that the agent has set for them."""
    names = [each.name for each in features.FEATURES if "worker" in each.modules]
    texts = ((name, environ.pop(features.text_variable(name), None)) for name in names)
    return tuple(
        import_module(f"{features.__name__}.{name}.worker").part(text) for name, text in texts if text is not None
    )
