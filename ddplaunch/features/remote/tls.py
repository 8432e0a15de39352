"""Encrypted connections of a run: its nodes trust one certificate, made for it.

Used by the launcher, and on a node by ``relay`` and by what gives code to other nodes. Loads ``ssl``, which takes time:
imported only where it is used.
"""

from __future__ import annotations

import os
import ssl
from typing import Any


class TlsSocket(ssl.SSLSocket):
    """A connection whose ``recv`` and ``send`` are those of a socket without encryption, also if it does not block.

    One side cannot end its direction alone: once a side has, OpenSSL refuses what the other one sends.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """As of a socket. What is decrypted already is returned too: no selector would announce it."""
        try:
            data = super().recv(buflen, flags)
            while self.pending():
                data += super().recv(self.pending(), flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        return data

    def send(self, data: Any, flags: int = 0) -> int:
        """As of a socket."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


def server_context(identity: bytes) -> ssl.SSLContext:
    """For the side that listens; ``identity``: private key and certificate, as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    # ssl reads keys from files only: this one is in memory.
    with open(os.memfd_create("certificate"), "wb") as file:
        file.write(identity)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return as_socket(context)


def client_context(certificate: str) -> ssl.SSLContext:
    """Connections to who has this certificate, and to nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return as_socket(context)


def as_socket(context: ssl.SSLContext) -> ssl.SSLContext:
    """``context``, whose connections are TlsSockets."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context
