"""What a shell completes after an option: words, files, schedulers, and the ids of this user's runs.

Runs in the process that the shell starts at a press of Tab, which parses no option. Must not raise, or print anything.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ddplaunch.protocol.environment import RUN_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import click
    from click.shell_completion import CompletionItem

    Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete ``incomplete`` as a path."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def folders(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete ``incomplete`` as the path of a folder."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def words(*known: str) -> Completer:
    """Complete to one of ``known``."""
    return lambda _ctx, _param, incomplete: _matching(known, incomplete)


def clusters(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete to a word of --cluster."""
    from ddplaunch.cluster import schedulers

    return _matching(("auto", "none", *(row.word for row in schedulers.TABLE)), incomplete)


def run_ids(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete to the id of a run of this user that has processes on this machine, except one that contains this."""
    from ddplaunch.system import run_tags

    tags: set[str] = set()
    agreed: dict[str, str] = {}  # Where each node has a launcher, its run tag does not contain the run id.
    for pid in _own_pids():
        tags.update(_tags(pid))
        agreed |= run_tags.launcher_memfds(pid)
    own = os.environ.get(RUN_ID, "")
    known = {tag: agreed.get(run_tags.run_tag_of(tag), run_tags.run_id_of(tag)) for tag in (*tags, own)}
    return _matching(sorted({*known.values()} - {known[own]}), incomplete)


def killable(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """As ``run_ids``, and what --keep-warm has left."""
    from ddplaunch import features
    from ddplaunch.text import KEEPER_ID

    kept = [KEEPER_ID] if any(each.is_waiting(os.environ) for each in features.loaded("early_agent")) else []
    return [*run_ids(ctx, param, incomplete), *_matching(kept, incomplete)]


def runs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete to ``last`` or to the id of a run with a folder in the default folder."""
    from ddplaunch.system.files import run_folders

    return _matching(("last", *run_folders.known_ids()), incomplete)


def _own_pids() -> Iterator[int]:
    """The processes of this user. Root may read the environment of others, too."""
    from ddplaunch.system import procfs

    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                yield pid


def _tags(pid: int) -> Iterator[str]:
    """The node tag in the environment of a process."""
    from ddplaunch.system import procfs, run_tags

    prefix = f"{RUN_ID}=".encode()
    for line in procfs.read(f"/proc/{pid}/environ").split(b"\0"):
        if line.startswith(prefix) and run_tags.is_tag(tag := os.fsdecode(line.removeprefix(prefix))):
            yield tag


def _matching(known: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in known if word.startswith(incomplete)]


BY_OPTION = {
    "--nproc-per-node": words("gpu", "xpu", "cpu", "auto"),
    "--event-log-handler": words("null", "console"),
    "--cluster": clusters,
    "--rdzv-backend": words("static", "c10d"),
    "--hang-report": words("off"),
    **dict.fromkeys(("--hostfile", "--env-file", "--remote-python", "--ssh-identity", "--ssh-config"), files),
    "--chdir": folders,
    "--kill": killable,
    "--stacks": run_ids,
    **dict.fromkeys(("--attach", "--leave", "--logs", "--page", "--ps", "--wait"), runs),
    "--logs-specs": words("default"),
}
"""How the value of an option is completed, where the option's type does not say it."""
