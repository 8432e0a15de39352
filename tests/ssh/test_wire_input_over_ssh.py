"""An agent on another machine that does not talk as agents do is given up, and its user told."""

from __future__ import annotations

import os

import pytest

from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import FirstRoundFormed, Notice, Output, Pong, RunIdAgreed, StopWorkers
from tests.support.connecting import ChannelClosed, connecting
from tests.support.processes import wait_until

pytestmark = pytest.mark.ssh

NONSENSE = {
    "text": b"Segmentation fault\n",
    "bytes": os.urandom(10_000) + b"\n",
    "deep": b"[" * 20_000 + b"\n",
    "order": wire.encode(StopWorkers(15, 1.0)),
    "folder": wire.encode(FirstRoundFormed(("runs", "others"))),
    "name": wire.encode(RunIdAgreed("others")),
    "lie": wire.encode(Output("node1", 0, 0, "stdout", 1 << 40)),
    "surrogate": b'{"record":"Notice","text":"\\ud800"}\n',
}


def test_what_is_no_record_ends_the_connection_and_is_told(make_lab):
    lab = make_lab(1)
    with lab.ssh_config.open("a") as config:
        config.writelines(lab.config_of(lab["node1"], name) for name in NONSENSE)
    with connecting(lab) as them:
        for name, data in NONSENSE.items():
            garbage = (wire.encode(Pong()) + data).hex()
            them.start(name, entry="tests.support.programs.garbage_agent", env={"GARBAGE": garbage})
        them.wait_for(ChannelClosed, len(NONSENSE))
        for name in NONSENSE:
            assert them.of(Pong, name) == [Pong()]
            (notice,) = them.of(Notice, name)
            assert notice.text.startswith(f"the agent on {name} sent an invalid record and was given up: ")
            assert notice.text.isprintable()
        wait_until(lambda: not lab.leftovers(), 15)
