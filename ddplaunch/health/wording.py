"""Sentences about findings. Used by agents, for failures and refusals, and by the launcher. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.text import ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.protocol.health import HealthFinding

_THE_GPU = "the GPU "


def gpu(finding: HealthFinding) -> str:
    """``GPU 3 (GPU-8f6a...)``; empty for a finding about the node."""
    if finding.gpu is None:
        return ""
    return f"GPU {finding.gpu} ({finding.uuid})" if finding.uuid else f"GPU {finding.gpu}"


def cause(finding: HealthFinding) -> str:
    """Why a worker has failed: ``Xid 79, GPU 3 (GPU-8f6a...) has fallen off the bus``."""
    subject = gpu(finding)
    if not subject:
        return finding.text
    before, found, after = finding.text.partition(_THE_GPU)
    if found:
        return f"{before.replace(': ', ', ')}{subject} {after}"
    return f"{subject}: {finding.text}"


def line(finding: HealthFinding, host: str, first_rank: int | None = None) -> str:
    """One line for the user; ``first_rank`` is the global rank of the node's local rank 0, if it is known."""
    subject = f"{gpu(finding)}{_users(finding, first_rank)}"
    action = f" ({finding.action})" if finding.action else ""
    return f"{host}: {subject}{': ' if subject else ''}{finding.text}{action}"


def _users(finding: HealthFinding, first_rank: int | None) -> str:
    if not finding.local_ranks:
        return ""
    local = f", local {ranks(finding.local_ranks)}"
    return local if first_rank is None else f"{local}, {ranks(first_rank + local for local in finding.local_ranks)}"


def refusal(findings: Sequence[HealthFinding], host: str) -> str:
    """One line on a node that is not used."""
    wrong = [finding for finding in findings if finding.severity == "refuse"]
    more = f"; and {len(wrong) - 1} more" if wrong[1:] else ""
    return f"{line(wrong[0], host)}{more}"
