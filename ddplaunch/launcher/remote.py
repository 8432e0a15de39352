"""How an agent is started on another machine, through whatever login shell is there, and what it answers. Pure.

The command that sshd gets never changes and names nothing of the user's. It reads one line from stdin and runs it as a
script of /bin/sh; that script sets the environment and becomes the Python that runs the agent. Before its first record
the agent's process writes one line with ``MARK`` and what it found: all before that is noise of login scripts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddplaunch
from ddplaunch.launcher.failures import HostFailure

if TYPE_CHECKING:
    from collections.abc import Mapping

_RUN_LINE = 'IFS= read -r line{}; eval "$(printf %b "$line")"'

COMMAND = f"exec /bin/sh -c '{_RUN_LINE.format('')}'"
"""Means the same to sh, bash, zsh, fish, csh and tcsh: one word in single quotes, no ``!``, backslash or newline."""

_LOGIN_COMMAND = f"""exec 3<&0 </dev/null
exec "$(command -v bash || echo /bin/sh)" -l -c '{_RUN_LINE.format(" <&3")}'
"""
"""For a setup text: the profile defines ``module`` and the like. What it runs must not read what is meant for us."""

MARK = b"@ddplaunch-agent@ "
MAX_ANSWER_BYTES = 1 << 16

_ROOT = str(Path(ddplaunch.__file__).parent.parent)
_OLDEST_PYTHON = (3, 10)

_START_VARIABLE = "DDPLAUNCH_START"

_SHELLS_OWN = re.compile(
    r"BASHOPTS|BASH_\w+|EUID|FUNCNAME|GROUPS|IFS|LINENO|OLDPWD|OPT\w+|PPID|PWD|SHELLOPTS|SHLVL|UID|_"
)
"""Read-only in some shell, which then ends, or meaningless on another machine."""

_STARTER = r"""
import json, os, re, sys
facts = {"pid": os.getpid(), "host": os.uname()[1], "python": ".".join(map(str, sys.version_info[:3]))}
sys.path[:not getattr(sys.flags, "safe_path", False)] = []
try:
    os.chdir(start["cwd"])
    facts["has_script"] = not start["script"] or os.path.exists(start["script"])
except OSError as error:
    facts["directory"] = error.strerror
try:
    try:
        import ddplaunch
    except ImportError:
        sys.path.append(start["root"])
        import ddplaunch
    facts["ddplaunch"] = ddplaunch.__version__
    from importlib.util import find_spec
    torch = find_spec("torch")
    if torch:
        facts["torch"] = "unknown"
        with open(os.path.join(torch.submodule_search_locations[0], "version.py")) as file:
            facts["torch"] = re.search("__version__ *= *.([^'\"]+)", file.read()).group(1)
except Exception as error:
    facts["error"] = "%s: %s" % (type(error).__name__, error)
os.write(1, ("\n" + start["mark"] + json.dumps(facts) + "\n").encode())
if facts.get("ddplaunch") == start["version"]:
    __import__(start["entry"], fromlist=["main"]).main()
"""
"""Any Python from 2.7 on understands it, and so can say that it is too old."""


@dataclass(frozen=True, kw_only=True)
class RemoteStart:
    """What an agent's process is given on another machine.

    Attributes:
        python: path or name of the interpreter there.
        env: what is set on top of the login's environment; ``setup`` has the last word.
        setup: shell text that runs before, in a login shell; empty for none.
        script: what must be there for the job to start, from ``cwd``; empty for nothing.
        needs_torch: its workers are to meet; only a sweep does without.
        entry: module whose ``main()`` is the agent.
    """

    python: str
    cwd: str
    env: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    script: str = ""
    needs_torch: bool = True
    entry: str = "ddplaunch.agent.main"


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself before its agent's first record; versions are empty where there is none.

    Attributes:
        failed: what ended the start before Python ran: ``python`` or ``setup``; ``status`` is its exit code.
        directory: why the working directory cannot be entered; empty if it was.
        error: why ddplaunch cannot be imported.
    """

    pid: int = 0
    host: str = ""
    python: str = ""
    ddplaunch: str = ""
    torch: str = ""
    error: str = ""
    directory: str = ""
    has_script: bool = True
    failed: str = ""
    status: int = 0


def first_input(start: RemoteStart) -> bytes:
    """What ``COMMAND`` must get on stdin. The agent's records may follow once its line with ``MARK`` was seen."""
    values = {"cwd": start.cwd, "script": start.script, "entry": start.entry}
    values |= {"root": _ROOT, "version": ddplaunch.__version__, "mark": MARK.decode()}
    env = {name: value for name, value in start.env.items() if _is_settable(name)}
    # JSON in ASCII is a Python literal too, here where all values are text.
    env[_START_VARIABLE] = f"start = {json.dumps(values)}\n{_STARTER}"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    python = shlex.quote(start.python)
    run = f"""exec {python} -c 'import os; exec(os.environ.pop("{_START_VARIABLE}"))'"""
    check = f"command -v {python} >/dev/null 2>&1 || {_give_up('python')}"
    if not start.setup:
        return _encode("\n".join([*lines, check, run]))
    setup = f"eval {shlex.quote(start.setup)} || {_give_up('setup')}"
    return _encode(_LOGIN_COMMAND) + _encode("\n".join([*lines, setup, check, f"{run} <&3 3<&-"]))


def read_facts(line: bytes) -> NodeFacts | None:
    """The facts in a line that the remote side has written; None if it is no such line."""
    if not line.startswith(MARK):
        return None
    try:
        body: Any = json.loads(line[len(MARK) :])
        facts = NodeFacts(**body)
    except (ValueError, TypeError):
        return None
    kinds = {name: type(value) for name, value in asdict(NodeFacts()).items()}
    return facts if all(type(value) is kinds[name] for name, value in asdict(facts).items()) else None


def judge(host: str, facts: NodeFacts, start: RemoteStart) -> HostFailure | None:
    """Why the node cannot take part; None if it can."""
    if facts.failed == "setup":
        message = f"--remote-setup ended with exit code {facts.status}"
        return HostFailure(host, "setup", message, "Try it with `ssh HOST`; end it with `; true` if that does no harm.")
    if facts.failed:
        hint = "Name one that every node has: --remote-python, or a --remote-setup that brings it into PATH."
        return HostFailure(host, "python", f"no {start.python}", hint)
    if tuple(map(int, re.findall(r"\d+", facts.python)[:2])) < _OLDEST_PYTHON:
        hint = "ddplaunch needs Python 3.10 on every node: --remote-python names another interpreter."
        return HostFailure(host, "python", f"{start.python} is Python {facts.python or 'of unknown version'}", hint)
    return _judge_packages(host, facts, start) or _judge_files(host, facts, start)


def judge_versions(facts: Mapping[str, NodeFacts]) -> tuple[HostFailure, ...]:
    """The hosts whose torch is not the one that most of them have: such a job hangs or fails where nobody looks."""
    versions = Counter(fact.torch for fact in facts.values() if fact.torch)
    if len(versions) < 2:
        return ()
    usual = versions.most_common(1)[0][0]
    hint = "All nodes must have one version of torch: --remote-python names the interpreter to use."
    return tuple(
        HostFailure(host, "torch", f"torch {fact.torch}, and {usual} on most hosts", hint)
        for host, fact in facts.items()
        if fact.torch not in ("", usual)
    )


def _judge_packages(host: str, facts: NodeFacts, start: RemoteStart) -> HostFailure | None:
    wanted = ddplaunch.__version__
    where = f"`pip install ddplaunch=={wanted}` for {start.python} there."
    if not facts.ddplaunch:
        return HostFailure(host, "ddplaunch", f"ddplaunch is missing ({facts.error})", where)
    if facts.ddplaunch != wanted:
        return HostFailure(host, "ddplaunch", f"ddplaunch {facts.ddplaunch}, and {wanted} here", where)
    if start.needs_torch and not facts.torch:
        hint = f"Install torch for {start.python} there, or name another interpreter with --remote-python."
        return HostFailure(host, "torch", f"{start.python} has no torch", hint)
    return None


def _judge_files(host: str, facts: NodeFacts, start: RemoteStart) -> HostFailure | None:
    if facts.directory:
        hint = "The job runs where ddplaunch was started, on every node; --chdir names another folder."
        return HostFailure(host, "directory", f"{start.cwd}: {facts.directory}", hint)
    if not facts.has_script:
        hint = "The script must be on every node under the same path, for example on a shared file system."
        return HostFailure(host, "script", f"no {start.script} in {start.cwd}", hint)
    return None


def _is_settable(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)) and not _SHELLS_OWN.fullmatch(name)


def _give_up(what: str) -> str:
    answer = shlex.quote(f'{MARK.decode()}{{"failed": "{what}", "status": %d}}\\n')
    return f"{{ status=$?; printf {shlex.quote(chr(92) + 'n')}{answer} $status; exit 1; }}"


def _encode(script: str) -> bytes:
    """One line that ``printf %b`` turns back into the script."""
    raw = script.encode("utf-8", "surrogateescape")
    return re.sub(rb"[^ -\[\]-~]", lambda match: b"\\0%03o" % match[0][0], raw) + b"\n"
