"""Hosts that have a copy give its files to others, for ``--sync``: the link of the launcher carries few copies.

Runs in agents without a run: ``give`` in threads of one, ``take`` in the main thread of another. The connection is
encrypted, with a key that the launcher has made for this run, and who takes must know a secret. What arrives is
compared with the hashes that the launcher has sent: a host that gives files cannot change code.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch.features.snapshot.queries import GiveFiles, Giving, Source
from ddplaunch.system import network
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import ssl

_CONNECT_S = 3.0
_SILENT_S = 10.0
"""A connection on which nothing moves for so long is closed, on both sides."""

_MAX_TAKERS = 16
_MAX_ADDRESSES = 2
_MAX_LINE_BYTES = 256
_ASKED_AT_ONCE = 64
"""Requests for files that are on the way: they fit into the buffers of a connection."""

_PIECE_BYTES = 1 << 20

_listeners: list[socket.socket] = []


def give(order: GiveFiles, files: Mapping[str, str]) -> Giving:
    """Let others take ``files``, paths by hash, until ``end``, or the end of this process.

    Raises:
        LaunchError, OSError: this host cannot listen.
    """
    from ddplaunch.features.remote import tls

    context = tls.server_context(order.identity.encode())
    listener = network.listen("this host", network.any_address(), 0)
    _listeners.append(listener)
    in_thread("files", lambda: _accept(listener, context, order.secret.encode(), files))
    return Giving(network.own_addresses(os.environ)[:_MAX_ADDRESSES], listener.getsockname()[1])


def end() -> None:
    """Give nothing more."""
    while _listeners:
        _listeners.pop().shutdown(socket.SHUT_RDWR)  # Ends the thread's wait.


def _accept(listener: socket.socket, context: ssl.SSLContext, secret: bytes, files: Mapping[str, str]) -> None:
    room = threading.Semaphore(_MAX_TAKERS)
    while room.acquire():
        try:
            accepted, _ = listener.accept()
        except OSError:
            return listener.close()

        def serve(accepted: socket.socket = accepted) -> None:
            try:
                with contextlib.suppress(OSError, ValueError, KeyError), accepted:
                    _serve(accepted, context, secret, files)
            finally:
                room.release()

        in_thread("files", serve)


def _serve(accepted: socket.socket, context: ssl.SSLContext, secret: bytes, files: Mapping[str, str]) -> None:
    """Send the files that a taker names, each from an offset on. Raises OSError, ValueError, KeyError: it is wrong."""
    accepted.settimeout(_SILENT_S)
    with context.wrap_socket(accepted, server_side=True) as connection, connection.makefile("rwb") as stream:
        if not hmac.compare_digest(stream.readline(_MAX_LINE_BYTES).rstrip(), secret):
            return
        while line := stream.readline(_MAX_LINE_BYTES):
            digest, offset = line.decode().split()
            with open(files[digest], "rb") as file:
                file.seek(int(offset))
                shutil.copyfileobj(file, stream, _PIECE_BYTES)
            stream.flush()


def take(source: Source, files: Mapping[str, tuple[int, int]], keep: Callable[[str, int, bytes], bool]) -> None:
    """Take files: by hash, the size, and the offset from which on they are missing.

    ``keep`` gets hash, offset and bytes, and returns whether the file is whole and has this hash.

    Raises:
        OSError: the source cannot be reached, is silent, or gives something else.
    """
    names = iter(files)
    with _connected(source) as stream:
        while some := list(itertools.islice(names, _ASKED_AT_ONCE)):
            stream.write("".join(f"{digest} {files[digest][1]}\n" for digest in some).encode())
            stream.flush()
            for digest in some:
                nbytes, offset = files[digest]
                while not keep(digest, offset, data := stream.read(min(_PIECE_BYTES, nbytes - offset))):
                    offset += len(data)
                    if not data or offset == nbytes:
                        raise OSError("it gives something else")


@contextlib.contextmanager
def _connected(source: Source) -> Iterator[Any]:
    from ddplaunch.features.remote import tls

    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_connect(source))
        connection.settimeout(_SILENT_S)
        encrypted = stack.enter_context(tls.client_context(source.certificate).wrap_socket(connection))
        stream = stack.enter_context(encrypted.makefile("rwb"))
        stream.write(f"{source.secret}\n".encode())
        yield stream


def _connect(source: Source) -> socket.socket:
    for address in source.addresses:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, source.port), _CONNECT_S)
    raise OSError("it cannot be reached")
