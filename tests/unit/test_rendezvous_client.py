"""The messages of a node about its rendezvous."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddplaunch.errors import LaunchError
from ddplaunch.protocol.launcher_agent import JoinRendezvous, Notice
from ddplaunch.protocol.rendezvous import (
    MemberReady,
    MemberSpec,
    NodeReady,
    NoFreePlace,
    RecordsRejected,
    RendezvousLost,
    RendezvousNotFound,
    RoundFormed,
    WaitingNodes,
)
from ddplaunch.protocol.results import RoundVerdict
from tests.support import golden
from tests.support.configs import a_round, agent_spec, rendezvous_config
from tests.support.members import GIVE_UP, READY, nodes

LOST = RendezvousLost("nothing answers there")
FORMED = RoundFormed(a_round(), max_restarts=3)
ENDED = RoundVerdict(0, "succeeded", decision="all workers have succeeded")
FAILED = RoundVerdict(0, "failed", decision="not restarted: --max-restarts is 0")


def told(
    said_first: Sequence[object],
    said_then: Sequence[object] = (),
    *,
    one_launcher: bool = False,
    node_dir: str | None = None,
    **config: Any,
) -> str:
    """What the user reads of a node whose member says this when it has started, and then to its NodeReady."""
    spec = agent_spec(host="gpu1", one_launcher_leads=one_launcher, node_dir=node_dir)
    error = ""
    with nodes() as new_node:
        node = new_node(spec, {MemberSpec: said_first, NodeReady: said_then}, **config)
        if one_launcher:
            node.post(JoinRendezvous(rendezvous_config(server_addresses=("127.0.0.1",), is_server=False, attempt=1)))
        try:
            if node.rendezvous.next_round():
                node.rendezvous.with_agreed(spec)
        except LaunchError as failure:
            error = f"error: {failure.message}\n{failure.hint}"
    notices = [record for record in node.sent if isinstance(record, Notice)]
    text = "\n".join([*(f"notice {notice.level}: {notice.text}" for notice in notices), error]).rstrip("\n")
    return re.sub(r"gpu1 \([^)]*\) (?=has not|cannot)", "gpu1 (<addresses>) ", text)


def test_the_messages_of_a_node(tmp_path: Path) -> None:
    ended = RendezvousLost("this node's member of the rendezvous has ended")
    missing, enough = WaitingNodes("gpu1", 1, 1), WaitingNodes("gpu[1-2]", 2, 0)
    holds_rank = MemberReady(1, "127.0.0.1", 29400, "job7", "key", rank_holder="gpu0")
    pages = {
        "it searches, in vain": told([RendezvousNotFound("nothing answers there", 600.0), LOST]),
        "it is refused": told([RendezvousLost("another run uses it", "Give another --rdzv-id.")]),
        "its member ends": told([ended], node_dir=str(tmp_path)),
        "its member ends, and there is no run folder": told([ended]),
        "nobody says where the rendezvous is served": told([LOST], is_server=None, port=1),
        "it has been there": told([READY], [LOST]),
        "nodes are missing": told([READY], [missing, GIVE_UP]),
        "nodes are missing that are lost": told([READY], [WaitingNodes("gpu1", 1, 1, "gpu[2-3]"), GIVE_UP]),
        "nodes are missing that one launcher starts": told([READY], [missing, GIVE_UP], one_launcher=True),
        "none is missing, and more may come": told([READY], [enough, GIVE_UP], max_nodes=3),
        "another has its node rank, and the limit is another": told([holds_rank], [FORMED], node_index=0),
        "it is a spare": told([READY], [NoFreePlace(("gpu2", "gpu3")), ENDED]),
        "it joins while the last round is stopped": told([READY], [FAILED]),
        "it joins too late": told([READY], [RoundVerdict(0, "failed", reason="the run had ended when it joined")]),
        "others write into the store": told([READY], [RecordsRejected(1), RecordsRejected(4), FORMED, LOST]),
    }
    golden.check("rendezvous_messages", pages)


def test_a_node_that_cannot_open_its_own_rendezvous_misses_nobody() -> None:
    text = told([GIVE_UP], is_server=True, port=0, min_nodes=1)
    assert re.fullmatch(r"error: gpu1 serves the rendezvous at 127.0.0.1:\d+, which did not open in 600 s", text)
