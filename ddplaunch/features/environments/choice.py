"""What ``--env`` asks for: reads the file that names the packages, and has the environment made here or on all hosts.

Runs in the process of the command, before the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError, OptionError, UsageError
from ddplaunch.features.environments import hashes, hosts, make, sent_uv
from ddplaunch.features.environments.queries import MakeEnvironment, OfferedFile
from ddplaunch.launcher import setup
from ddplaunch.launcher.launch import told_if_slow
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote, size

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

PACK = "pack"
"""In place of a file: the launcher's own environment."""

_PROJECT, _LOCK, _SETTINGS = "pyproject.toml", "uv.lock", "uv.toml"
_MAX_BYTES = 16 << 20
_INCLUDED = re.compile(r"^(?:-r|-c|--requirement|--constraint)[ =]*(\S+)", re.MULTILINE)
_LOCAL = re.compile(r"^(?:(?:-e|--editable)[ =].*|(?:[./~]|file:).*|.*@ *file:.*)", re.MULTILINE)
_PYTHON_ARGUMENT = re.compile(r"-p|--python(=|$)")

_DETERMINING = re.compile(
    r"UV_(BUILD_CONSTRAINT|CONSTRAINT|DEFAULT_INDEX|DEV|EXCLUDE|EXCLUDE_NEWER|EXTRA_INDEX_URL|FIND_LINKS|FORK_STRATEGY"
    r"|INDEX|INDEX_STRATEGY|INDEX_URL|NO_BINARY.*|NO_BUILD.*|NO_DEFAULT_GROUPS|NO_DEV|NO_GROUP|NO_SOURCES.*|OVERRIDE"
    r"|PRERELEASE|RESOLUTION|TORCH_BACKEND)"
)
"""Those of the others that may lead to other packages; without the names and passwords of indexes, which change."""


def at_start(config: LaunchConfig) -> LaunchConfig:
    """``config`` of a run whose agents, and so workers, run with the Python of the environment.

    Raises:
        LaunchError: there is none, and it cannot be made. UsageError: the options do not describe one.
    """
    if config.python:
        raise UsageError("--env and PYTHON_EXEC exclude each other", "Unset PYTHON_EXEC.", ("--env",))
    if config.remote.python and config.is_local:
        return config  # This run has its environment.
    if config.env == PACK:
        from ddplaunch.features.environments import pack

        return pack.at_start(config)
    uv, wheels = sent_uv.own_uv(), _wheels(config.env_wheels)
    paths = [*filter(None, [uv]), *wheels.values()]
    with told_if_slow(config, 3.0, "the wheels are read, to know which of them hosts lack"):
        found = hashes.of_files(paths, f"{config.env_wheels}")
    order = order_of(config, uv, wheels, found)
    files = {found[path]: path for path in paths}
    return _here(config, order, files) if config.is_local else hosts.on_hosts(config, order, files)


def _here(config: LaunchConfig, order: MakeEnvironment, files: dict[str, str]) -> LaunchConfig:
    progress, host = hosts.Progress(config, order.main), setup.local_host_name()
    answer = make.make(order, files, lambda text: progress.tell(host, text))
    if answer.problem:
        message = f"the environment of {quote(order.main)} cannot be made on {host}\n  {hosts.problem_of(answer)}"
        raise LaunchError(message, answer.hint)
    notices = (*config.notices, hosts.notice([answer], order.main))
    return replace(config, remote=replace(config.remote, python=answer.python), notices=notices)


def order_of(config: LaunchConfig, uv: str, wheels: dict[str, str], hashes: Mapping[str, str]) -> MakeEnvironment:
    """What is asked of this machine, or of each host. ``uv`` and ``wheels`` are paths; empty: there are none.

    ``hashes``: theirs, by path.

    Raises:
        UsageError: the file does not describe an environment that can be made elsewhere.
    """
    main, files = _files(os.path.abspath(config.env or ""))
    args = _arguments(config.env_args)
    python = os.environ.get("UV_PYTHON") or _python_of(files, main) or ".".join(map(str, sys.version_info[:2]))
    variables = {} if config.is_local else sent_uv.variables()
    settings = "" if config.is_local else _user_settings()
    offered = {name: OfferedFile(hashes[path], os.path.getsize(path)) for name, path in wheels.items()}
    determining = [
        *(sorted(files.items()), main, args, python, settings),
        sorted((name, value) for name, value in os.environ.items() if _DETERMINING.fullmatch(name)),
        sorted((name, file.hash) for name, file in offered.items()),
    ]
    return MakeEnvironment(
        name=re.sub(r"[^A-Za-z0-9_-]+", "-", os.path.basename(main))[:60].strip("-") or "environment",
        main=main,
        files=files,
        python=python,
        args=args,
        variables=variables,
        settings=settings,
        digest=hashlib.sha256(json.dumps(determining).encode()).hexdigest(),
        folder=config.env_dir or "",
        needs_torch=config.entry != "program",
        uv=OfferedFile(hashes[uv], os.path.getsize(uv)) if uv else None,
        machine=os.uname().machine,
        wheels=offered,
    )


def _arguments(text: str | None) -> tuple[str, ...]:
    try:
        args = tuple(shlex.split(text or ""))
    except ValueError as error:
        raise OptionError("--env-args", quote(text or ""), str(error)) from None
    if any(_PYTHON_ARGUMENT.match(each) for each in args):
        raise OptionError("--env-args", quote(text or ""), "must not name a Python", "The variable UV_PYTHON does.")
    return args


# The files.


def _files(path: str) -> tuple[str, dict[str, str]]:
    """The file that names the packages, and the texts of all that belong to it, by path relative to a common folder.

    Raises:
        UsageError: a file is missing, or it is none of which environments are made.
    """
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        raise OptionError("--env", path, "is a folder", "Name its uv.lock, pyproject.toml or requirements.txt.")
    if name in (_LOCK, _PROJECT) and os.path.exists(os.path.join(folder, _LOCK)):
        main, found = os.path.join(folder, _LOCK), {_LOCK, _PROJECT}
    elif name == _PROJECT or name.endswith((".txt", ".in")):
        main, found = path, {name}
    else:
        hint = "It is a uv.lock, pyproject.toml, or a file in the format of requirements.txt: its name ends in .txt."
        raise OptionError("--env", path, "is no file of which environments are made", hint)
    paths = {os.path.join(folder, each): _text(os.path.join(folder, each)) for each in found}
    if main.endswith((".txt", ".in")):
        paths |= _with_included(main)
    for each in (_SETTINGS, ".python-version"):
        if os.path.exists(beside := os.path.join(folder, each)):
            paths[beside] = _text(beside)
    top = os.path.commonpath([os.path.dirname(each) for each in paths])
    return os.path.relpath(main, top), {os.path.relpath(each, top): text for each, text in sorted(paths.items())}


def _text(path: str) -> str:
    try:
        with kept_files.open_regular(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OptionError("--env", path, str(error.strerror)) from None
    if len(data) > _MAX_BYTES:
        raise OptionError("--env", path, f"is larger than {size(_MAX_BYTES)}")
    return data.decode("utf-8", "surrogateescape")


def _with_included(path: str, seen: tuple[str, ...] = ()) -> dict[str, str]:
    """The text of a file in the format of requirements.txt, and of those that it names by ``-r`` and ``-c``."""
    text = _text(path)
    if local := _LOCAL.search(text):
        hint = (
            "An environment is kept for later runs, and has no code that changes: leave the line out, and put the "
            "folder on PYTHONPATH; or build a wheel, and name its folder by --env-wheels."
        )
        raise OptionError("--env", path, f"{quote(local[0])} is a path of this machine", hint)
    found = {path: text}
    for name in _INCLUDED.findall(text):
        other = os.path.normpath(os.path.join(os.path.dirname(path), name))
        if "://" not in name and other not in (*seen, path):
            found |= _with_included(other, (*seen, path))
    return found


def _python_of(files: dict[str, str], main: str) -> str:
    """The version in a file ``.python-version`` beside the main one; empty: there is none."""
    text = files.get(os.path.join(os.path.dirname(main), ".python-version"), "")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return lines[0] if lines else ""


# What hosts get besides.


def _user_settings() -> str:
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = os.environ.get("UV_CONFIG_FILE") or os.path.join(config, "uv", _SETTINGS)
    return _text(path) if os.path.exists(path) and not os.environ.get("UV_NO_CONFIG") else ""


def _wheels(folder: str | None) -> dict[str, str]:
    """The wheels in a folder, by name.

    Raises:
        UsageError: there are none.
    """
    if not folder:
        return {}
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith((".whl", ".tar.gz")))
    except OSError as error:
        raise OptionError("--env-wheels", folder, str(error.strerror)) from None
    if not names:
        raise OptionError("--env-wheels", folder, "has no wheels", "`pip download -d DIR -r FILE` fills a folder.")
    return {name: os.path.realpath(os.path.join(folder, name)) for name in names}
