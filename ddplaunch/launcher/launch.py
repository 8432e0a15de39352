"""Entry of the launcher: starts the agent of a single local node first, then imports the rest of the launcher.

Runs in the user's process: the ``ddplaunch`` command, or any program that calls ``launch``. Imports little, since the
agent's start-up takes longest.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.errors import LaunchError, StartNotice
from ddplaunch.system import run_tags
from ddplaunch.system.files import run_folder
from ddplaunch.text import quote
from ddplaunch.transport import agent_process

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.protocol.run_result import RunResult
    from ddplaunch.transport.agent_process import AgentProcess

_NEVER_FULL = 1 << 30
"""So many collections of young objects do not come before the end of a run."""

_SLOW_START_S = 10.0
"""Seconds from the start, without a console, after which a line says what it may be waiting for."""


def launch(config: LaunchConfig, stdout_fd: int = 1, *, ends_process: bool = False) -> RunResult:
    """Run the job and return its result. Then all its processes have ended, except the result's ``unkillable_pids``.

    In the main thread, signals are handled as by the command until ``launch`` returns; in another thread they are not
    handled. The workers' stdout goes to ``stdout_fd``. ``ends_process`` is as for ``post_signals``.

    Raises:
        LaunchError: the job could not be started, or an agent was lost.
    """
    config = features.at_start(features.prepare(config, stdout_fd))
    where = config.output.log_dir or run_folder.base_at_home(os.environ) or "the temporary files"
    slow = f"the start takes long: perhaps the file system of {quote(str(where))} does not answer"
    with told_if_slow(config, _SLOW_START_S, slow) as begun:
        run_id = config.run_id or run_folder.new_run_id()
        return _launch(config, run_id, stdout_fd, None, begun, ends_process=ends_process)


def launch_detached(config: LaunchConfig, run_id: str, folder: Path) -> RunResult:
    """As ``launch``, in a process that ends afterwards; ``config`` is prepared.

    Its stdout and stderr are console.log in the run ``folder``, which ``setup`` has made.
    """
    return _launch(config, run_id, 1, folder, ends_process=True)


@contextlib.contextmanager
def told_if_slow(config: LaunchConfig, limit_s: float, text: str) -> Iterator[Callable[[], None]]:
    """Say ``text`` if the block takes longer, from another thread: a file system that hangs blocks the main thread.

    Not with --quiet, and not once the function is called.
    """

    def tell() -> None:
        with contextlib.suppress(OSError, AttributeError):  # It was closed before Python started.
            sys.stderr.write(f"ddplaunch: {text}\n")

    timer = threading.Timer(limit_s, tell)
    timer.name, timer.daemon = "slow start", True
    if config.output.verbosity >= 0:
        with contextlib.suppress(RuntimeError):  # No room for a thread.
            timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def _launch(
    config: LaunchConfig,
    run_id: str,
    stdout_fd: int,
    folder: Path | None,
    begun: Callable[[], None] = lambda: None,
    *,
    ends_process: bool,
) -> RunResult:
    if other := features.instead(config):
        begun()
        result: RunResult = other.run(config, run_id, folder, stdout_fd=stdout_fd, ends_process=ends_process)
        return result
    run_tag = config.begun.run_tag if config.begun else run_tags.new_run_tag(run_id, is_unique=not config.run_id)
    early = agent_process.early_agent(config, run_tag, stdout_fd, _load_setup)
    with run_tags.launcher_memfd(run_tag), early as agent:
        if agent and agent.kept:
            config = replace(config, notices=(*config.notices, StartNotice("detail", agent.kept)))
        return run(config, run_id, run_tag, agent, stdout_fd, folder, begun, ends_process=ends_process)


def _load_setup() -> None:
    """Import what the agent's AgentSpec needs; all that ``run`` imports would delay it."""
    from ddplaunch.launcher import setup  # noqa: F401


def run(
    config: LaunchConfig,
    run_id: str,
    run_tag: str,
    early_agent: AgentProcess | None,
    stdout_fd: int,
    folder: Path | None = None,
    begun: Callable[[], None] = lambda: None,
    *,
    ends_process: bool = False,
) -> RunResult:
    """Run the job, with the run's folder, console and signal handlers; arguments and errors as for ``Run``.

    ``folder`` is that of a detached run; for others it is created. ``begun`` is called when there is a console.
    """
    # Imported while the agent starts.
    from ddplaunch.launcher import setup
    from ddplaunch.mailbox import Mailbox
    from ddplaunch.system import signals
    from ddplaunch.system.limits import NO_ROOM_HINT

    mailbox: Mailbox[object] = Mailbox()
    collections = without_full_collections() if ends_process else contextlib.nullcontext()
    posted = (*config.signals, *signals.PASSED_TO_WORKERS, "SIGTSTP")
    with collections, signals.post_signals(posted, mailbox.post, ends_process=ends_process):
        is_detached, warning = folder is not None, None
        if folder is None:
            folder, warning = setup.create_run_folder(config, run_id)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_folder.released(folder))
            early_agent = early_agent and setup.send_early(config, run_id, folder, early_agent)
            from ddplaunch.launcher.run import Run

            console = setup.open_console(config, folder, stdout_fd, is_detached=is_detached)
            stack.enter_context(contextlib.closing(console))
            begun()
            if warning:
                console.show(f"ddplaunch: {warning}")
            try:
                job = Run(config, run_id, run_tag, early_agent, mailbox, folder, console)
            except OSError as error:  # Too many open files: what this run needs is imported now.
                raise LaunchError(f"the launcher cannot start: {error}", NO_ROOM_HINT) from None
            return job.run()


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """In the ``with`` block Python looks for garbage in circles among young objects only.

    A full collection stops all threads, also that of the pings: for a tenth of a second and more when hundreds of nodes
    have sent what they know of a hang. Records are in no circles; the objects of another program's process may be.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER_FULL)
    try:
        yield
    finally:
        gc.set_threshold(*before)
