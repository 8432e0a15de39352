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
from ddplaunch.rounds import FROM_MEMBER, Gathered, MemberReady, MemberSpec, NodeGone, RendezvousLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from ddplaunch.config import Meeting

_ENDED = "the rendezvous process of this node has ended"
_NOT_HOSTED = (
    "The node that has this address serves the rendezvous, if the port is free there: start ddplaunch on it too, or "
    "name another one. --rdzv-conf read_timeout=SECONDS waits longer."
)
_NOT_STARTED = "Is the node that serves it started, and its port open? --rdzv-conf join_timeout=SECONDS waits longer."


class Membership:
    """A node's place in one rendezvous.

    Attributes:
        index: the node's number there; None until the rendezvous has it.
        reached: the address of the node that serves, by which it was reached; known with ``index``.
        address: where other nodes reach this one; likewise.
        serves: this node serves the store.
        gathered: who waits for the next round, as far as was heard.
        is_spare: other nodes have all places; this one waits for one to be free.
        lost: why there is no way to the others any more; empty while there is.
        has_left: they go on without this node.
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
        self.lost = self._not_reached = ""
        self.is_spare = self.has_left = False
        self.gathered = Gathered(host, 1, (len(meeting.seats) or meeting.min_nodes) - 1)
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

    def leave(self) -> None:
        """Tell the others that this node takes part no more."""
        self.has_left = True
        if self.index is not None:
            self.say(NodeGone(self.index))

    def patience(self, deadline: float) -> float:
        """``deadline`` of the wait for a round: a spare node may have to wait as long as the run goes on."""
        return float("inf") if self.is_spare else deadline

    # For the user. What can go wrong is told as message and hint.

    def waiting(self) -> str:
        """While nodes are waited for."""
        missing = self.gathered.missing
        count = f"{missing} more node{'s' if missing > 1 else ''}"
        return f"waiting at {self.where} for {count}; here: {self.gathered.hosts}"

    def full(self, hosts: tuple[str, ...]) -> str:
        """While all places are taken."""
        return f"the run at {self.where} has all its nodes ({', '.join(hosts)}); {self._host} waits for a place"

    def not_reached(self, reason: str) -> str:
        """While the node that serves does not answer, for ``reason``."""
        self._not_reached = reason
        limit_s = self.meeting.silence_s or self.meeting.join_timeout_s
        return f"{self._me} looks for the rendezvous at {self.where}{self._why_not_here}, for {limit_s:g} s: {reason}"

    def cannot_meet(self) -> tuple[str, str]:
        """The rendezvous is lost, or was never reached."""
        if self.index is not None:
            return (
                f"{self._host} cannot meet the other nodes at {self.where}: {self.lost}",
                f"This node's address on the way there is {self.own_address()}. Is the node that serves it started, "
                "and its port open?",
            )
        reason = self.lost or self._not_reached or "nobody has answered there in time"
        return (
            f"{self._me} cannot meet the other nodes at {self.where}{self._why_not_here}: {reason}",
            _NOT_HOSTED if self.meeting.serves is None else _NOT_STARTED,
        )

    def too_few(self) -> tuple[str, str]:
        """The others have not come in time, or this node has not found them."""
        if self.index is None and not self.serves:
            return self.cannot_meet()
        timeout_s, here = self.meeting.join_timeout_s, self.gathered
        return (
            f"after {timeout_s:g} s only these nodes have come to {self.where}: {here.hosts}; "
            f"{here.count + here.missing} are needed",
            "Start the others with the same --rdzv-endpoint and --rdzv-id.",
        )

    @property
    def _me(self) -> str:
        return f"{self._host} ({', '.join(endpoint.own_addresses(os.environ)[:4]) or 'no address but loopback'})"

    @property
    def _why_not_here(self) -> str:
        """Where nobody is told to serve, the node that has the address does, if it can."""
        if self.meeting.serves is not None:
            return ""
        is_mine = endpoint.is_here(self.addresses[0])
        return ", its own address and a port that is taken" if is_mine else ", which is no address of its own"

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
            silence_s=meeting.join_timeout_s if meeting.silence_s is None else meeting.silence_s,
            last_call_s=meeting.last_call_s,
            lost_after_s=meeting.lost_after_s,
            seats=meeting.seats,
            other_ports=() if self.serves else meeting.other_ports,
            attempt=meeting.attempt,
            restarts=meeting.restarts,
        )
