"""The launcher of one job: a fork of this process, in a session of its own, with console.log for its output."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Collection
from typing import TYPE_CHECKING, NoReturn

from ddplaunch import features
from ddplaunch.errors import INTERNAL, LaunchError
from ddplaunch.features.come_back import detached
from ddplaunch.launcher import launch
from ddplaunch.launcher.display import console_log
from ddplaunch.system import linux
from ddplaunch.system.files import kept_files, run_folder
from ddplaunch.text import escape

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import LaunchConfig


def load(config: LaunchConfig) -> None:
    """Import what the launcher of each job would import."""
    from ddplaunch.launcher import run, setup  # noqa: F401

    for modules in (features.watch_modules(config), features.modules("early_agent")):
        list(modules)


def start(config: LaunchConfig, run_id: str, folder: Path, sweep: Path, handled: Collection[int]) -> int:
    """Start the launcher of a run in ``folder``, which is locked, and return its pid. It then has the lock.

    It ends in order, as after SIGTERM, when this process ends. ``sweep`` is the folder of all jobs, ``handled`` are the
    signals for which this process has handlers.

    Raises:
        OSError: there is no room for a process, or no file.
    """
    parent = os.getpid()
    with run_folder.released(folder):
        log = kept_files.open_to_append(folder / console_log.FILE)
        try:
            detached.flush()
            pid = os.fork()
            if pid == 0:
                _be_launcher(config, run_id, folder, sweep, handled, parent, log)
        finally:
            os.close(log)
    return pid


def _be_launcher(
    config: LaunchConfig, run_id: str, folder: Path, sweep: Path, handled: Collection[int], parent: int, log: int
) -> NoReturn:
    code = INTERNAL
    try:
        signal.set_wakeup_fd(-1)
        with run_folder.released(sweep):
            pass
        detached.leave(log)
        for signum in handled:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        linux.die_with_parent(parent, signal.SIGTERM)
        code = launch.launch_detached(config, run_id, folder).exit_code
    except LaunchError as error:
        code = error.exit_code
        if not error.is_shown:
            print(f"ddplaunch: {escape(error.text)}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        detached.flush()
        os._exit(code)
