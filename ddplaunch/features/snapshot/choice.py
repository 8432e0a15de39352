"""Which snapshot a run uses: a new one, that of --use-snapshot, or that with which its SLURM job has begun.

Runs in the process of the command, before the run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.config import NO_LOGS, LaunchConfig
from ddplaunch.errors import LaunchError, StartNotice, UsageError
from ddplaunch.features.snapshot import code_files, copies, hosts
from ddplaunch.launcher import setup
from ddplaunch.launcher.launch import told_if_slow
from ddplaunch.system.files import run_folder, script_file
from ddplaunch.system.files.script_file import working_folder
from ddplaunch.text import plural, quote, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.cli.commands import Request
    from ddplaunch.features.snapshot.code_files import Repository
    from ddplaunch.features.snapshot.copies import Facts


def at_start(config: LaunchConfig) -> LaunchConfig:
    """``config`` with the folder of the snapshot, and with the script in it.

    Raises:
        LaunchError: there is no snapshot, and none can be taken. UsageError: what runs is no Python code of a file.
    """
    _check(config)
    kept = _of_job(config)
    used = config.code or kept
    folder = os.path.realpath(used) if config.code or os.path.exists(kept) else _new(config)
    found = _facts(folder)
    if kept and not config.code:
        _note(kept, folder)
    text = quote(f"the workers run a snapshot of {found.root}: {copies.of_run(folder, found).version}", 500)
    told = [StartNotice("info", text), StartNotice("detail", f"the snapshot is {quote(folder, 500)}")]
    script = _script_in(folder, found, config)
    started = replace(config, code=folder, script=script, notices=(*config.notices, *told))
    if config.sync and not config.is_local:
        return hosts.send(started, folder, found, _working_directory(found.root))
    return started


def _working_directory(root: str) -> str:
    """The working directory, relative to ``root``, the code; empty if it is elsewhere: then workers run in the root."""
    here = os.path.realpath(working_folder())
    return os.path.relpath(here, root) if here.startswith(f"{root}/") else ""


def not_sent(path: str, folder: str, found: Facts) -> str:
    """What to tell if a worker of ``--sync`` has not found ``path``, which is here; empty: it is not, or was sent.

    ``folder``: the snapshot, with what its marker says.
    """
    project, name = map(re.escape, folder.split("/")[-2:])
    at_root = re.fullmatch(rf"/.*/({copies.FOLDER}/{project}/{name}|work/{project})/(.*)", path, re.DOTALL)
    inside = at_root[2] if at_root else os.path.join(_working_directory(found.root), path)
    here = os.path.normpath(os.path.join(found.root, inside))
    sent = {*found.files, *copies.folders_of(found.files)}
    inside = os.path.relpath(here, found.root)
    if inside in sent or not os.path.exists(here):
        return ""
    if inside.startswith("../"):
        is_told = not path.startswith("/")  # Others may be on all hosts at times, as in /tmp.
        return f"{quote(path, 500)} is on this machine, but outside of the code: it is not sent" if is_told else ""
    unsent = next(each for each in itertools.accumulate(inside.split("/"), os.path.join) if each not in sent)
    shown = os.path.relpath(os.path.join(found.root, unsent), os.path.realpath(working_folder()))
    option = f"--snapshot-include {shlex.quote(shown)}"
    return quote(f"{shown} is on this machine, but was not sent to the hosts: {option} sends it", 1000)


def _check(config: LaunchConfig) -> None:
    options = ("--use-snapshot",) if config.code else ("--sync",) if config.sync else ("--snapshot",)
    if config.sync and config.chdir:
        raise UsageError("--sync and --chdir exclude each other", "", ("--sync", "--chdir"))
    if config.entry in ("program", "function"):
        what = "a program" if config.entry == "program" else "a function"
        hint = "The variable DDPLAUNCH_SNAPSHOT gives this option, too." if config.code else ""
        raise UsageError(f"{options[0]}: not for {what}: it is not known which files are its code", hint, options)
    if config.entry == "module" and config.python and shutil.which(config.python) != sys.executable:
        raise UsageError(f"{options[0]}: a module is run by the Python of ddplaunch only", "", options)


def _new(config: LaunchConfig) -> str:
    if config.script_file:
        script_file.check_readable(os.path.join(config.chdir or "", config.script_file), setup.local_host_name())
    base = _base(config)
    with told_if_slow(config, 3.0, f"the code is copied to {base}"):
        return copies.take(_repository(config), _include(config), base)


def _repository(config: LaunchConfig) -> Repository:
    return code_files.repository_of(code_files.folder_of(config))


def _include(config: LaunchConfig) -> tuple[str, ...]:
    return tuple(map(os.path.abspath, config.snapshot_include))


def _base(config: LaunchConfig) -> str:
    log_dir = config.output.log_dir
    base = run_folder.default_base(os.environ) if log_dir in (None, NO_LOGS) else log_dir
    return os.path.abspath(str(base))


def _script_in(folder: str, found: Facts, config: LaunchConfig) -> str:
    """The script's path in the snapshot; of what is no file, as it is."""
    if not config.script_file:
        return config.script
    path = _script_path(config)
    script = os.path.join(folder, os.path.relpath(path, folder if path.startswith(folder + "/") else found.root))
    file = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
    is_copied = os.path.exists(file) and os.path.realpath(file).startswith(folder + "/")
    if os.path.lexists(path) and not is_copied:
        raise UsageError(
            f"{quote(config.script, 500)}: is not in the snapshot of {quote(found.root, 500)}",
            "--snapshot-include takes a file into it that git ignores. A link must lead to a file of the code.",
        )
    return script


def _script_path(config: LaunchConfig) -> str:
    return os.path.join(os.path.realpath(code_files.folder_of(config)), os.path.basename(config.script_file))


# A job that SLURM starts again.


def _of_job(config: LaunchConfig) -> str:
    """A link to the snapshot with which the SLURM job has started this run for the first time; empty: not in a job."""
    job = config.slurm_job
    if job is None:
        return ""
    key = json.dumps([job.id, config.script, config.script_args, code_files.folder_of(config)])
    link = os.path.join(copies.folder_in(_base(config)), f"job-{hashlib.sha256(key.encode()).hexdigest()[:16]}")
    if not job.requeue_count:  # The ids of jobs begin again when a cluster is installed anew.
        with contextlib.suppress(OSError):
            os.unlink(link)
    return link


def _note(link: str, folder: str) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            os.symlink(folder, link)
    except OSError as error:
        raise LaunchError(f"--snapshot: {link}: {error.strerror}") from None


# What others ask.


@functools.cache
def _facts(folder: str) -> Facts:
    return copies.facts(folder)


def for_agent(config: LaunchConfig) -> str | None:
    """The snapshot for agents, in JSON; None: the run has none.

    ``roots``: the folders of which ``copy`` is the copy, for Python's search path; ``content``: the hash of what it
    has; ``cwd``: with --sync, the working directory of workers. A path may begin with ``~``, the home on the host.
    """
    if config.code is None:
        return None
    found = _facts(config.code)
    is_sent = config.sync and not config.is_local
    copy, work = hosts.paths(config.code) if is_sent else (config.code, found.root)
    said = {"roots": list(dict.fromkeys([found.root, work])), "copy": copy, "content": found.content}
    return json.dumps({**said, "cwd": config.chdir} if is_sent else said)


def planned(config: LaunchConfig) -> LaunchConfig:
    """``config`` as --plan shows it: with the paths of the copy, and with notices that say what is copied where.

    Nothing is. Raises as ``at_start``.
    """
    _check(config)
    if config.code:
        folder = os.path.realpath(config.code)
        found = _facts(folder)
        root, script = found.root, _script_in(folder, found, config)
        sizes = [noted[0] for noted in found.files.values() if len(noted) > 1]
        told = [f"the workers run the snapshot {folder} of {root}: {_amount(sizes)}"]
    else:
        repository, base = _repository(config), _base(config)
        sizes = [file.size for file in copies.files_of(repository, _include(config), base).values() if not file.target]
        root, folder = repository.root, os.path.join(copies.project_in(base, repository.root), "<hash>")
        relative = os.path.relpath(_script_path(config), root) if config.script_file else ""
        script = os.path.join(folder, relative) if relative else config.script
        told = [f"the code in {root} is copied to {folder}: {_amount(sizes)}"]
    config = replace(config, script=script)
    if config.sync and not config.is_local:
        config = hosts.on_hosts(config, folder, _working_directory(root))
        told.append(f"each host gets what it lacks of them, into {hosts.paths(folder)[0]}")
    return replace(config, notices=(*config.notices, *(StartNotice("info", quote(text, 500)) for text in told)))


def _amount(sizes: Sequence[int]) -> str:
    return f"{plural(len(sizes), 'file')}, {size(sum(sizes))}"


def show(request: Request) -> None:
    """``--take-snapshot``: print the folder of the snapshot."""
    config = request.configure(snapshot=True)
    _check(config)
    folder = _new(config)
    _script_in(folder, _facts(folder), config)
    request.show(folder)
