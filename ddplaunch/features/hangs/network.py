"""Says which ranks get no answer over the network, as far as the kernel's TCP knows. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ddplaunch.text import quote, ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.features.hangs.records import RankEvidence

_MAX_LINES = 3
_MAX_PEERS = 4


def unanswered_sentences(evidences: Iterable[RankEvidence]) -> list[str]:
    """``ranks 0-1 on gpu0 get no answer over TCP from 10.0.0.2``; one sentence for each host, of a few hosts."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    peers: defaultdict[str, set[str]] = defaultdict(set)
    for evidence in evidences:
        if evidence.unanswered:
            members[evidence.host].append(evidence.rank)
            peers[evidence.host].update(evidence.unanswered)
    return [_sentence(host, sorted(found), sorted(peers[host])) for host, found in list(members.items())[:_MAX_LINES]]


def _sentence(host: str, members: list[int], peers: list[str]) -> str:
    more = f" and {len(peers) - _MAX_PEERS} more" if len(peers) > _MAX_PEERS else ""
    verb = "gets" if len(members) == 1 else "get"
    whom = ", ".join(map(quote, peers[:_MAX_PEERS]))
    return f"{ranks(members)} on {quote(host)} {verb} no answer over TCP from {whom}{more}"
