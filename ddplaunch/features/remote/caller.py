"""What a node runs so that its agent's channel is a connection to the launcher: ``first_input`` of a common command.

Runs in the launcher, which sends it as text. One command starts agents on many nodes, and has the same stdin for all of
them: the setup, the secret of the run, and where the launcher listens. On each node a shell runs the setup and executes
Python, which connects. The connections become its stdin, stdout and stderr, and it starts the agent: from there on
everything is as with a command of its own (``remote_start``).

Until then a node prints to its stdout: first ``ddplaunch on NAME``, then what the setup prints, and a line of facts if
it cannot go on. The launcher reads that through the command.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.remote import remote_start
from ddplaunch.features.remote.relay import ERRORS, RECORDS, SEND_BUFFER_BYTES
from ddplaunch.protocol import environment
from ddplaunch.protocol.agent_entry import START_VARIABLE

if TYPE_CHECKING:
    from ddplaunch.features.remote.remote_start import RemoteStart

ON_NODE = re.compile(r"ddplaunch on (\S+)")

_MAX_CALL_S = 20.0
"""Seconds for which a node tries to connect."""

_TRY_S = 3.0
"""Seconds until it tries the next address."""

_CALLER = r"""
import hashlib, hmac, json, os, socket, sys, time

def read_words(read):
    line = b""
    while not line.endswith(b"\n"):
        byte = read(1)
        if not byte:
            raise OSError("the connection was closed")
        line += byte
    return line.decode().rstrip("\n").split(" ")

def proof(*words):
    return hmac.new(given["secret"].encode(), " ".join(words).encode(), hashlib.sha256).hexdigest()

def connect(address, kind):
    connection = socket.create_connection((address, given["port"]), call["try_s"])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, call["send_buffer_bytes"])
    own = hashlib.sha256(os.urandom(32)).hexdigest()
    words = (kind, name, read_words(connection.recv)[-1], own)
    connection.sendall((" ".join((kind, name, own, proof("agent", *words))) + "\n").encode())
    answer, tag = read_words(connection.recv)
    if not hmac.compare_digest(answer, proof("launcher", tag, *words)):
        raise OSError("another program answers")
    connection.settimeout(None)
    return connection, tag

def connect_both():
    deadline = time.time() + call["call_s"]
    while True:
        for address in addresses:
            try:
                return [connect(address, kind) for kind in call["kinds"]]
            except Exception as error:
                why[address] = getattr(error, "strerror", None) or str(error)
        if time.time() > deadline:
            return None
        time.sleep(0.2)

def call_launcher():
    (errors, _), (records, tag) = connections
    for connection, number in ((errors, 2), (records, 0), (records, 1)):
        os.dup2(connection.fileno(), number)
    errors.close()
    records.close()
    if os.environ.get(call["tag"], "") != tag:
        os.environ.update({call["tag"]: tag, call["called"]: "1", call["start"]: text})
        os.execv(sys.executable, [sys.executable, "-c", call["run"]])

if not os.environ.pop(call["called"], ""):
    why, connections = {}, None
    name = os.environ.get(call["name"]) or "unknown"
    try:
        given = json.loads(" ".join(read_words(lambda nbytes: os.read(0, nbytes))))
        addresses = given["addresses"] or [os.environ[each] for each in call["addresses"] if each in os.environ]
        connections = connect_both()
        told = ", ".join("%s:%s (%s)" % (address, given["port"], why[address]) for address in sorted(why))
    except Exception as error:
        told = "an address: %s: %s" % (type(error).__name__, error)
    if not connections:
        facts = {"failed": "call", "error": told, "python": ".".join(map(str, sys.version_info[:3]))}
        os.write(1, ("\n" + start["prefix"] + json.dumps(facts) + "\n").encode())
        sys.exit(1)
    call_launcher()
"""
"""Valid from Python 2.7 on, as ``remote_start``'s text. A process that has not the tag of its node starts anew."""


def first_input(starts: Sequence[RemoteStart], name: str, number: str, addresses: Sequence[str] = ()) -> bytes:
    """Stdin of the command for all nodes, up to what ``remote_start.COMMAND`` executes; ``credentials`` must follow.

    Args:
        starts: how the agents are started: but for the tags of the nodes, in the same way.
        name: the variable in which each node has its name.
        number: the variable in which it has its number, probably in the order of ``starts``.
        addresses: variables in which it has an address of the launcher.
    """
    start = starts[0]
    call = {
        "name": name,
        "addresses": [*addresses],
        "kinds": [ERRORS, RECORDS],
        "run": remote_start.RUN_TEXT,
        "start": START_VARIABLE,
        "tag": environment.RUN_ID,
        "called": "DDPLAUNCH_CALLED",
        "call_s": min(_MAX_CALL_S, start.timeout_s / 2),
        "try_s": _TRY_S,
        "send_buffer_bytes": SEND_BUFFER_BYTES,
    }
    env = {key: value for key, value in start.env.items() if key != environment.RUN_ID}
    before = f'exec 2>&1\necho "ddplaunch on ${name}"{_export_tag([tag_of(each) for each in starts], number)}'
    return remote_start.first_input(replace(start, env=env), f"call = {call!a}\n{_CALLER}", before)


def tag_of(start: RemoteStart) -> str:
    """The tag of the node; empty if its agent has none."""
    return start.env.get(environment.RUN_ID, "")


def _export_tag(tags: Sequence[str], number: str) -> str:
    """A line of a shell that sets the tag of each node, if the numbers of the nodes follow each other."""
    run_tag, _, first = tags[0].rpartition(".")
    if tags != [f"{run_tag}.{int(first) + count}" for count in range(len(tags))] if first.isdecimal() else True:
        return ""
    count = f"$(({first} + {number}))" if len(tags) > 1 else first
    return f"\nexport {environment.RUN_ID}={shlex.quote(run_tag)}.{count}"


def credentials(secret: str, port: int, address: str = "") -> bytes:
    """The line behind ``first_input``. Without an ``address``, a node connects to those that it has in variables."""
    return json.dumps({"secret": secret, "port": port, "addresses": [address] if address else []}).encode() + b"\n"
