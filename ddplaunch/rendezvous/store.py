"""Serves the workers' c10d TCPStore of one attempt; a process of its own, killed when the attempt ends."""

from __future__ import annotations

import resource
import signal
import socket


def serve(listen_fd: int) -> None:
    """Answer on a socket that listens already, until killed.

    The socket is bound and listening before any worker starts: a worker that connects before torch is imported here
    waits in the kernel's queue. ``master_listen_fd`` keeps the store on that one address; by itself torch listens on
    every interface.
    """
    # A store has nothing to say at the end, and no one to say it to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from torch.distributed import TCPStore

    allow_many_clients()
    listener = socket.socket(fileno=listen_fd)
    address, port = listener.getsockname()[:2]
    listener.detach()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    while store:
        signal.pause()


def allow_many_clients() -> None:
    """Each takes an open file of this process, and many systems give a user 1,024 but allow far more."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
