"""This node's way into one rendezvous: the member's process, the channel to it, and the addresses on the way.

Main thread only; what the member says, and its end, are posted as events.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.agent import endpoint
from ddplaunch.agent.events import FromMember
from ddplaunch.rounds import FROM_MEMBER, MemberReady, MemberSpec, RendezvousLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from ddplaunch.config import Meeting

_ENDED = "the rendezvous process of this node has ended"


class Membership:
    """A node's place in one rendezvous.

    Attributes:
        index: the node's number there; None until the rendezvous has it.
        reached: the address of the node that serves, by which it was reached; known with ``index``.
        address: where other nodes reach this one; likewise.
        serves: this node serves the store.
        gathered: hosts that wait for the next round.
        lost: why there is no way to the others any more; empty while there is.
    """

    def __init__(self, host: str, meeting: Meeting) -> None:
        """Bind the endpoint's socket, if this node owns it.

        Raises:
            LaunchError: this node is told to serve, and cannot; or the endpoint's name means nothing here.
        """
        if meeting.interface and not meeting.local_addr:
            meeting = replace(meeting, local_addr=endpoint.address_of(host, meeting.interface))
        self.meeting = meeting
        self.index: int | None = None
        self.lost = ""
        self.gathered: tuple[str, ...] = (host,)
        self._host = host
        self._listener, self.addresses = endpoint.own(host, meeting)
        self.serves = self._listener is not None
        self.port: int = self._listener.getsockname()[1] if self._listener else meeting.port
        self.reached = self.address = ""
        if not self.serves and len(self.addresses) == 1:
            self.own_address()  # Now, not after a wait: a name that means nothing here.
        self._channel: BinaryIO | None = None

    @property
    def where(self) -> str:
        ports = () if self.serves or self.index is not None else self.meeting.other_ports
        return f"{self.addresses[0]}:{self.port}" + (f" (or port {', '.join(map(str, ports))})" if ports else "")

    def enter(self, max_restarts: int, start: Callable[[list[int]], None], post: Callable[[object], None]) -> None:
        """Have ``start`` start the member's process, with these descriptors."""
        ours, theirs = socket.socketpair()
        self._channel = ours.makefile("wb")
        stream = ours.makefile("rb")
        ours.close()
        self.say(self._spec(max_restarts))  # First: what there is to say while the process starts waits in the socket.
        null = os.open(os.devnull, os.O_RDWR)
        last = self._listener.detach() if self._listener else os.dup(null)
        self._listener = None
        start([null, os.dup(null), os.dup(null), theirs.detach(), last])
        threading.Thread(target=self._listen, args=(stream, post), name="rendezvous", daemon=True).start()

    def ready(self, event: MemberReady) -> None:
        """The rendezvous has this node.

        Raises:
            LaunchError: there is no way back from there to this node.
        """
        self.index = event.node_index
        self.reached, self.port = event.reached, event.port
        self.address = self.meeting.local_addr or (event.reached if self.serves else self.own_address())

    def own_address(self) -> str:
        """This node's address on the way to the one that serves.

        Raises:
            LaunchError: that one's name means nothing here.
        """
        return endpoint.route_address(self._host, self.reached or self.addresses[0], self.port)

    def listen(self, reached: str) -> socket.socket:
        """A socket for the workers' store, where other nodes reach this one: by ``reached``, if they have.

        Raises:
            LaunchError: the address is not this node's.
        """
        self.address = self.meeting.local_addr or reached or self.address
        return endpoint.listen(self._host, endpoint.bindable(self.address), 0)

    def say(self, record: object) -> None:
        """Tell the member, and by it the coordinator. The end of a member that cannot hear it is posted anyway."""
        if self._channel:
            with contextlib.suppress(OSError):
                self._channel.write(protocol.encode(record))
                self._channel.flush()

    def waiting(self, missing: int) -> str:
        """For the user, while ``missing`` nodes are waited for."""
        count = f"{missing} more node{'s' if missing > 1 else ''}"
        return f"waiting at {self.where} for {count}; here: {', '.join(self.gathered)}"

    def too_few(self) -> tuple[str, str]:
        """Message and hint when the others have not come in time."""
        timeout_s, nodes = self.meeting.join_timeout_s, ", ".join(self.gathered)
        return (
            f"after {timeout_s:g} s only these nodes have come to {self.where}: {nodes}; "
            f"{len(self.meeting.seats) or self.meeting.min_nodes} are needed",
            "Start the others with the same --rdzv-endpoint and --rdzv-id.",
        )

    def close(self) -> None:
        """Leave without a word: the member's process ends."""
        if self._channel:
            with contextlib.suppress(OSError):  # What could not be said to a process that is gone.
                self._channel.close()
            self._channel = None
        if self._listener:
            self._listener.close()

    def _listen(self, stream: BinaryIO, post: Callable[[object], None]) -> None:
        with stream:
            try:
                while (received := protocol.read_record(stream, FROM_MEMBER)) is not None:
                    post(FromMember(self.meeting.token, received[0]))
            except (OSError, protocol.ProtocolError):
                pass
        post(FromMember(self.meeting.token, RendezvousLost(_ENDED)))

    def _spec(self, max_restarts: int) -> MemberSpec:
        meeting = self.meeting
        return MemberSpec(
            token=meeting.token,
            node_id=f"{self._host} {os.urandom(8).hex()}",
            node_index=meeting.node_rank,
            hosts=self.addresses,
            port=self.port,
            serves=self.serves,
            min_nodes=meeting.min_nodes,
            max_nodes=meeting.max_nodes,
            max_restarts=max_restarts,
            connect_timeout_s=meeting.join_timeout_s,
            last_call_s=meeting.last_call_s,
            lost_after_s=meeting.lost_after_s,
            seats=meeting.seats,
            other_ports=() if self.serves else meeting.other_ports,
            attempt=meeting.attempt,
            restarts=meeting.restarts,
        )
