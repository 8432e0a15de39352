"""What a shell completes after an option: the ids of runs.

Runs in the process that the shell starts at a press of Tab, which parses no option. Must not raise, or print anything.
"""

from __future__ import annotations

import os

from ddplaunch.protocol.environment import RUN_ID


def run_ids() -> list[str]:
    """The ids of this user's runs that have processes on this machine, except one that contains this."""
    from ddplaunch.features.runs import own_pids
    from ddplaunch.system import procfs, run_tags

    tags: set[str] = set()
    agreed: dict[str, str] = {}  # Where each node has a launcher, its run tag does not contain the run id.
    for pid in own_pids():
        tags.update(filter(run_tags.is_tag, procfs.values(procfs.read(f"/proc/{pid}/environ"), RUN_ID)))
        agreed |= run_tags.launcher_memfds(pid)
    own = os.environ.get(RUN_ID, "")
    known = {tag: agreed.get(run_tags.run_tag_of(tag), run_tags.run_id_of(tag)) for tag in (*tags, own)}
    return sorted({*known.values()} - {known[own]})


def killable() -> list[str]:
    """As ``run_ids``, and what --keep-warm has left."""
    from ddplaunch import features
    from ddplaunch.text import KEEPER_ID

    kept = [KEEPER_ID] if any(each.is_waiting(os.environ) for each in features.modules("early_agent")) else []
    return [*run_ids(), *kept]


def runs() -> list[str]:
    """``last``, and the ids of runs with a folder in the default folder."""
    from ddplaunch.features.runs import run_folders

    return ["last", *run_folders.known_ids()]
