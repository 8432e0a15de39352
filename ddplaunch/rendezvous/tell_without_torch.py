"""Tells the other nodes that this one does not come, although torch cannot be used here.

The agent starts this process when its node has failed before it could join. It imports no torch. It writes into the
rendezvous store, or answers at the endpoint if this node should serve it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

from ddplaunch.protocol import wire
from ddplaunch.protocol.rendezvous import MemberSpec, NodeCannotJoin
from ddplaunch.rendezvous.boxes import send_to_coordinator
from ddplaunch.rendezvous.connect import JoinRefused, verified
from ddplaunch.rendezvous.plain_store import PlainStore, ServerCannotJoin, ask_whether_it_comes, offer
from ddplaunch.rendezvous.store import Signer, cannot_join_key, key_prefix, open_key

_PAUSE_S = 0.2


def main() -> None:
    """Read a MemberSpec and a NodeCannotJoin from stdin, and tell it until the others have heard it.

    The argument is the descriptor of the endpoint's socket, on the node that serves it. The agent ends this
    process after a while: another node may still import torch, or come late.
    """
    received = [wire.read_record(sys.stdin.buffer, (kind,)) for kind in (MemberSpec, NodeCannotJoin)]
    if None in received:
        return
    spec, cannot_join = (each[0] for each in received if each)
    settings = spec.rendezvous
    if settings.is_server:
        text = Signer(settings.secret).sign(cannot_join_key(spec), wire.encode(cannot_join).decode("ascii").rstrip())
        offer(socket.socket(fileno=int(sys.argv[1])), text, settings.min_nodes - 1)
        return
    endpoints = [(a, port) for port in (settings.port, *settings.other_ports) for a in settings.server_addresses]
    with contextlib.suppress(JoinRefused, ServerCannotJoin, RuntimeError):  # Then nobody waits for this node.
        while not any(_told(spec, cannot_join, *endpoint) for endpoint in endpoints):
            time.sleep(_PAUSE_S)


def _told(spec: MemberSpec, cannot_join: NodeCannotJoin, address: str, port: int) -> bool:
    """Whether the rendezvous is open there, and has got ``cannot_join``.

    Raises:
        JoinRefused, RuntimeError: it is not that of this node.
        ServerCannotJoin: the node that serves it does not come.
    """
    with contextlib.suppress(OSError), PlainStore(address, port) as store:
        if store.check(open_key(spec)):
            signer = verified(spec, Signer(spec.rendezvous.secret), store.get(open_key(spec)))
            send_to_coordinator(store, signer, key_prefix(spec), cannot_join)
            return True
    ask_whether_it_comes(spec, address, port)
    return False
