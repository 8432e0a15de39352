"""The answer to ``--stacks``: what the job does in sentences, and a line for the ranks that do the same. Pure.

Runs in the launcher.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.rank_state import JobState, RankState, rank_state
from ddplaunch.features.hangs.records import MAX_LINES
from ddplaunch.text import duration, plural, quote, ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.features.hangs.explanation import Explanation
    from ddplaunch.features.hangs.records import RankEvidence

_MAX_SENTENCE = 1000
_MAX_WHERE = 200


def sentences(evidences: Sequence[RankEvidence], found: Explanation) -> tuple[str, ...]:
    """Whether the job moves; if not, ``found``'s explanation."""
    running = [each for each in evidences if each.is_running]
    if not running:
        return ("nothing to examine: the workers have ended",)
    window = f"in the last {max(each.window_s for each in running):.1f} s"
    if found.job_state is JobState.MOVING:
        moving = [each.rank for each in running if rank_state(each) is RankState.MOVING]
        return (f"the job moves: {ranks(moving)} wrote output, or called or finished a collective, {window}",)
    silent = f"no output for {duration(min(each.silent_s for each in running))}"
    first = {
        JobState.STUCK: f"nothing moved {window}; {silent}",
        JobState.BUSY: f"some ranks wait for others, and some are busy {window}; {silent}",
        JobState.QUIET: f"no rank waits for another; some are busy {window}; {silent}",
    }[found.job_state]
    return (first, *(quote(sentence, _MAX_SENTENCE) for sentence in found.sentences))


def lines(evidences: Sequence[RankEvidence]) -> tuple[str, ...]:
    """``ranks 0, 2-3: waiting, at train.py:6 in step``; ordered by the lowest rank."""
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for evidence in evidences:
        alike[_line(evidence)].append(evidence.rank)
    groups = sorted(alike.items(), key=lambda item: min(item[1]))
    shown = [f"{ranks(members)}: {text}" for text, members in groups[: MAX_LINES - 1]]
    others = sum(len(members) for _, members in groups[MAX_LINES - 1 :])
    return tuple([*shown, f"{plural(others, 'more rank')} elsewhere"] if others else shown)


def _line(evidence: RankEvidence) -> str:
    state = rank_state(evidence).value
    parts = [state, f"at {quote(evidence.where, _MAX_WHERE)}" if evidence.where else "", evidence.blocked_state]
    return ", ".join(quote(part, _MAX_WHERE) for part in parts if part)
