"""Serves a c10d TCPStore: the workers' store of one attempt in a separate process, or the store of the rendezvous.

The process of the workers' store is started by the forkserver, and killed by the agent at the end of the attempt. The
records in the store of a rendezvous are signed, so that only nodes of the run can write them.
"""

from __future__ import annotations

import hmac
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from ddplaunch.system import linux, signals
from ddplaunch.system.limits import raise_open_files

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ddplaunch.protocol.rendezvous import MemberSpec


def serve(listen_fd: int) -> None:
    """Serve on a listening socket until killed.

    The socket listens before any worker starts: a worker that connects while this process imports torch waits in the
    kernel's queue.
    """
    signals.leave_to_agent()
    try:
        store = open_store(listen_fd)
    except RuntimeError as error:  # No thread can be started: the limit of processes is reached.
        sys.exit(f"it cannot be served: {str(error).partition(chr(10))[0]}")
    while store:
        signal.pause()


def open_store(listen_fd: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Serve a store on a listening socket; it ends with the process. ``timeout`` is for calls of the returned client.

    ``master_listen_fd`` keeps the store on one address; without it torch listens on every interface.

    Raises:
        RuntimeError: the store cannot be served; the message is torch's.
    """
    from torch.distributed import TCPStore

    # Each client takes an open file; many systems have a soft limit of 1,024 and a far higher hard limit.
    raise_open_files()
    linux.ignore_name_servers()
    listener = socket.socket(fileno=listen_fd)
    address, port = listener.getsockname()[:2]
    listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd)


class Signer:
    """Signs texts with a secret; a signature is valid for one key of the store in one rendezvous.

    Nothing is encrypted. Without a secret nothing is signed: whoever reaches the store can then write records.

    Attributes:
        nonce: text of the rendezvous, with a random part; empty before the rendezvous is open.
    """

    def __init__(self, secret: str, nonce: str = "") -> None:
        """With ``nonce``, a record of an earlier rendezvous is invalid."""
        self._secret, self.nonce = secret, nonce
        self._key = hmac.digest(os.fsencode(secret), nonce.encode(), "sha256") if secret else b""

    def for_nonce(self, nonce: str) -> Signer:
        """The signer of the rendezvous with this nonce."""
        return Signer(self._secret, nonce)

    def for_node(self, nonce: str) -> Signer:
        """The signer of the coordinator's records to the node that has this nonce; itself if that is empty."""
        return self.for_nonce(f"{self.nonce} {nonce}") if nonce else self

    @property
    def has_secret(self) -> bool:
        """Whether texts are signed."""
        return bool(self._key)

    def sign(self, store_key: str, text: str) -> str:
        """The value to store at ``store_key`` for an ASCII text."""
        return f"{self._signature(store_key, text.encode())} {text}" if self._key else text

    def verify(self, store_key: str, value: bytes) -> bytes | None:
        """The text in a value of the store; None if its signature is missing or invalid."""
        if not self._key:
            return value
        signature, _, text = value.partition(b" ")
        return text if hmac.compare_digest(signature, self._signature(store_key, text).encode()) else None

    def _signature(self, store_key: str, text: bytes) -> str:
        return hmac.digest(self._key, store_key.encode() + b"\n" + text, "sha256").hex()


# Keys of the store of a rendezvous.


def cannot_join_key(spec: MemberSpec) -> str:
    """What a NodeCannotJoin is signed with that is in no store."""
    return f"{key_prefix(spec)}/cannot_join"


def open_key(spec: MemberSpec) -> str:
    """The key that the node that serves the rendezvous sets when the others may join."""
    return f"{key_prefix(spec)}/open"


def lost_key(spec: MemberSpec, index: int | str) -> str:
    """The key that the coordinator's member sets when the node with this index has left or is lost."""
    return f"{key_prefix(spec)}/lost/{index}"


def beat_key(spec: MemberSpec, index: int | str) -> str:
    """The key with the heartbeats of the node with this index: a counter."""
    return f"{key_prefix(spec)}/beat/{index}"


def key_prefix(spec: MemberSpec) -> str:
    """Prefix of all keys of a run: several runs may use one store."""
    return f"ddplaunch/{spec.rendezvous.token}"
