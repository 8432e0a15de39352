"""What starts an agent on another machine through any login shell: the command, its first input, the facts it reports.

Runs in the launcher. The transports to other machines send the command; this module makes the texts and checks the
facts. That command is constant, without the user's texts: it reads one line from stdin and runs the line as a /bin/sh
script, which sets the environment and executes the agent's Python. Before its first record the agent's process writes
one line: ``FACTS_PREFIX`` and JSON. Everything before that line is output of login scripts, or asks for what the node
needs (``package``).
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from ddplaunch.features.remote import package
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import environment
from ddplaunch.protocol.agent_entry import (
    AGENT_MODULE,
    COLLECT_SELDOM,
    DROP_FIRST_PATH,
    LOAD_PACKAGE,
    STANDARD_LIBRARY_FIRST,
    START_VARIABLE,
)
from ddplaunch.system.files.script_file import working_folder
from ddplaunch.transport import transports
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import NodeFacts, Purpose
from ddplaunch.version import __version__

if TYPE_CHECKING:
    from collections import deque

    from ddplaunch.config import LaunchConfig

_RUN_LINE = 'IFS= read -r line{}; eval "$(printf %b "$line")"'

COMMAND = f"exec /bin/sh -c '{_RUN_LINE.format('')}'"
"""Valid in sh, bash, zsh, fish, csh and tcsh: one word in single quotes, without ``!``, backslash or newline."""

_LOGIN_COMMAND = f"""exec 3<&0 </dev/null
exec "$(command -v bash || echo /bin/sh)" -l -c '{_RUN_LINE.format(" <&3")}'
"""
"""For ``--remote-setup``: a login shell, whose profile defines ``module``. The launcher's input is descriptor 3."""

_WATCH_PARENT = """ddplaunch_watcher=$({
while read -r _ _ _ parent _ <"/proc/$$/stat"; do
[ "$parent" = "$PPID" ] || { trap "" TERM; kill -s TERM -- "-$$"; sleep 1; kill -s KILL -- "-$$"; }
sleep 1
done
} </dev/null 3<&- >/dev/null 2>&1 & echo $!)"""
"""For ``--remote-setup``: once sshd has closed the connection, and so ended, end the process group of the login. The
process is no child of the shell: a ``wait`` of the setup does not wait for it."""

_END_WATCH = 'kill -s KILL "$ddplaunch_watcher" 2>/dev/null || :'

FACTS_PREFIX = b"@ddplaunch-agent@ "
MAX_ANSWER_BYTES = 1 << 16
_FIRST_RECORD_S = 300
"""Seconds until SIGALRM ends an agent that has received no record: its machine may be cut off from the launcher."""

_MAX_LOGIN_OUTPUT_BYTES = 1 << 20
_SHOWN_LINES, _SHOWN_CHARS = 3, 500
"""Of the output of a --remote-setup that failed."""

_OLDEST_PYTHON = (3, 10)

_ANY_PYTHON = """ddplaunch_folder=
command -v "$ddplaunch_python" >/dev/null 2>&1 ||
for ddplaunch_python in python3 python3.13 python3.12 python3.11 python3.10; do
for ddplaunch_folder in "" "$HOME/.local/bin/"; do
"$ddplaunch_folder$ddplaunch_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break 2
done
done
ddplaunch_python="$ddplaunch_folder$ddplaunch_python\""""
"""Without the launcher's interpreter, any other: that of the system, or one that uv has installed."""

_LARGEST_PID = 1 << 22
"""PID_MAX_LIMIT of Linux (proc_pid_max(5))."""
_SHELL_VARIABLES = re.compile(
    r"BASHOPTS|BASH_\w+|EUID|FUNCNAME|GROUPS|IFS|LINENO|OLDPWD|OPT\w+|PPID|PWD|SHELLOPTS|SHLVL|UID|_"
)
"""Variables that a shell does not allow to set, or that have no meaning on another machine."""

_BEGIN = f"{COLLECT_SELDOM}\n{DROP_FIRST_PATH}\n{STANDARD_LIBRARY_FIRST}\n{package.HAS_PACKAGE}"

_STARTER = r"""
import json, re, signal

def say(prefix, text):
    os.write(1, ("\n" + prefix + text + "\n").encode())

def read(nbytes):
    signal.alarm(start["first_record_s"])
    data = os.read(0, nbytes)
    signal.alarm(0)
    return data or sys.exit(1)

def read_line():
    line = b""
    while not line.endswith(b"\n"):
        line += read(1)
    return line

def needed(name):
    say(start["needs"], name)
    left, parts = int(read_line()), []
    while left:
        parts.append(read(left))
        left -= len(parts[-1])
        say(start["needs"], "")
    return b"".join(parts)

def receive(roots):
    body, scope = json.loads(needed("receiver").decode()), {}
    exec(body["text"], scope)
    return scope["receive"](body["wanted"], roots, body["bases"], lambda: needed("package"))

def use_package():
    from importlib import util
    found = util.find_spec("ddplaunch")
    installed = [os.path.dirname(os.path.dirname(found.origin))] if found and found.origin else []
    roots = installed + [start["package"]["root"]]
    root = next((each for each in roots if has_package(each, start["package"])), None) or receive(roots)
    facts["sent"] = root not in roots
    if root not in installed:
        for name in [name for name in sys.modules if name.split(".")[0] == "ddplaunch"]:
            del sys.modules[name]
        sys.path.append(root)
        exec(start["load"], {"root": root, "sys": sys})
    import ddplaunch
    facts["ddplaunch"] = ddplaunch.__version__

facts = {"pid": os.getpid(), "python": ".".join(map(str, sys.version_info[:3]))}
try:
    cwd, script = map(os.path.expanduser, (start["cwd"], start["script"]))
    if "gets_code" in start and not os.path.isdir(cwd):
        os.makedirs(cwd, 0o700)
    os.chdir(cwd)
    facts["has_script"] = "gets_code" in start or not script or os.path.exists(script)
except OSError as error:
    facts["directory"] = error.strerror
given = read_line() if "connects" in start else b""
try:
    if sys.version_info[:2] >= (3, 10):
        use_package()
        from importlib.util import find_spec
        torch = find_spec("torch")
        if torch:
            facts["torch"] = "unknown"
            with open(os.path.join(torch.submodule_search_locations[0], "version.py")) as file:
                facts["torch"] = re.search("__version__ *= *.([^'\"]+)", file.read()).group(1)
except Exception as error:
    facts["error"] = "%s: %s" % (type(error).__name__, error)
if "ddplaunch" in facts and "connects" in start:
    from ddplaunch.features.remote.relay import connect_node
    marker = "\n" + start["prefix"] + json.dumps({"has_connected": True}) + "\n"
    facts["not_connected"] = connect_node(given, marker.encode())
    facts["pid"] = os.getpid()
agent = None
if "ddplaunch" in facts and "kept" in start and "directory" not in facts:
    from ddplaunch import features
    for module in features.modules("early_agent"):
        agent = agent or module.offer_here(start, facts)
say(start["prefix"], json.dumps(facts))
if agent:
    agent.follow()
if "ddplaunch" in facts:
    signal.alarm(start["first_record_s"])
    __import__(start["entry"], fromlist=["main"]).main()
"""
"""Valid from Python 2.7 on, so that an old interpreter can report its version."""

RUN_TEXT = f'import os; text = os.environ.pop("{START_VARIABLE}"); exec(text)'
"""What Python executes."""

SLOW_HINT = "A slow file system, busy CPUs, a slow link or --remote-setup? --start-timeout allows more."
"""Hint where an agent has not started in time."""


@dataclass(frozen=True, kw_only=True)
class RemoteStart:
    """How to start an agent on another machine.

    Attributes:
        python: path or name of the interpreter there.
        cwd: working directory; with ``~`` it is below the home there, and so is ``script``.
        env: variables set on top of the login environment; ``setup`` can override them.
        any_python: another interpreter will do, if the host has not ``python``.
        setup: shell text that runs first, in a login shell; empty for none.
        script: file that must exist, relative to ``cwd``; empty for none.
        needs_torch: torch must be installed; false for an agent without workers.
        kept: what a keeper that an earlier run has left there is asked with: the modules of --preload, the script,
            and --keep-warm, None if that is not given. None: it is not asked.
        entry: module whose ``main()`` is the agent.
        gets_code: the script comes later; ``cwd`` is made, but if it cannot be, the agent starts elsewhere.
        connects: it connects to the launcher, if it can (``relay``): what it needs for that follows ``first_input``.
        login_command: what opens a shell there, for hints; empty: they name nothing.
        timeout_s: seconds from the login to the facts, ``setup`` included.
    """

    python: str
    cwd: str
    any_python: bool = False
    env: dict[str, str] = field(default_factory=dict)
    setup: str = ""
    script: str = ""
    needs_torch: bool = True
    kept: dict[str, Any] | None = None
    entry: str = AGENT_MODULE
    gets_code: bool = False
    connects: bool = False
    login_command: str = ""
    timeout_s: float = 60.0


def agent_start(config: LaunchConfig, index: int, node_tag: str, purpose: Purpose = "run") -> RemoteStart:
    """How to start the agent of node ``index``. All processes of a node of a run get ``node_tag`` in their environment.

    Only an agent with workers needs torch and the script, and one that is no part of a run needs no folder.

    Raises:
        LaunchError: the launcher's working directory has been deleted.
    """
    transport, named = transports.row(config.transport), config.hosts[index].python or config.remote.python
    start = RemoteStart(
        python=named or sys.executable,
        any_python=purpose == "query" and not named,
        cwd="/",
        env=dict(config.remote.environ),
        setup=config.remote.setup,
        needs_torch=False,
        login_command=transport.login_command,
        timeout_s=config.remote.start_timeout_s,
    )
    if purpose == "query":
        return start
    start = replace(start, cwd=config.chdir or working_folder(), env={**start.env, environment.RUN_ID: node_tag})
    if purpose == "sweep":
        return start
    asks = config.keep_warm_s != 0 and transport.keeps_warm
    kept = {"preload": config.workers.preload, "script": config.script_file, "seconds": config.keep_warm_s}
    start = replace(start, script=config.script_file, gets_code=config.sync)
    return replace(start, needs_torch=True, kept=kept if asks else None)


def first_input(start: RemoteStart, text: str = "", before: str = "") -> bytes:
    """Stdin of ``COMMAND``. Records must follow after the facts only: a login script may read earlier input.

    ``before``: lines of a shell that run first. ``text``: of Python, which runs before the agent's start; all of Python
    that runs is there in the variable ``text``.
    """
    values: dict[str, Any] = {"cwd": start.cwd, "script": start.script, "entry": start.entry}
    values |= {"package": package.identity(), "needs": package.PREFIX.decode(), "prefix": FACTS_PREFIX.decode()}
    values |= {"load": LOAD_PACKAGE, "first_record_s": _FIRST_RECORD_S}
    if start.kept:
        values["kept"] = start.kept
    values |= {name: True for name in ("connects", "gets_code") if getattr(start, name)}
    env = {name: value for name, value in start.env.items() if _is_settable(name)}
    # A Python literal in ASCII; JSON would write an emoji as two surrogates, which Python does not join.
    env[START_VARIABLE] = f"start = {values!a}\n{_BEGIN}\n{text}{_STARTER}"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    find = [f"ddplaunch_python={shlex.quote(start.python)}", *([_ANY_PYTHON] if start.any_python else [])]
    check = f'command -v "$ddplaunch_python" >/dev/null 2>&1 || {_exit_with("python")}'
    run = f"exec \"$ddplaunch_python\" -c '{RUN_TEXT}'"
    if not start.setup:
        return _encode("\n".join([before, *lines, *find, check, run]))
    # The setup may end the shell itself, by `exit` or `set -e`.
    setup = f"trap {shlex.quote(_exit_with('setup'))} EXIT; eval {shlex.quote(start.setup)} || exit; trap - EXIT"
    lines += [_WATCH_PARENT, setup, _END_WATCH, *find, check, f"{run} <&3 3<&-"]
    return _encode(f"{before}\n{_LOGIN_COMMAND}") + _encode("\n".join(lines))


def signal_input(name: str, pid: int, node_tag: str) -> bytes:
    """Stdin of ``COMMAND`` that sends SIG``name`` to ``pid`` if the environment of this process holds ``node_tag``.

    The pid comes from the node: it may belong to another pid namespace, or to another process by now.
    """
    variable = shlex.quote(f"{environment.RUN_ID}={node_tag}")
    environ = f"tr '\\000' '\\n' </proc/{pid}/environ"
    return _encode(f"{environ} | LC_ALL=C grep -qxF {variable} && kill -{name} {pid}")


def read_facts(line: bytes) -> NodeFacts | None:
    """The facts in a line of the remote stdout; None if it contains none."""
    if not line.startswith(FACTS_PREFIX):
        return None
    try:
        body: Any = json.loads(line[len(FACTS_PREFIX) :])
        facts = NodeFacts(**body)
    except (ValueError, TypeError):
        return None
    kinds = {name: type(value) for name, value in asdict(NodeFacts()).items()}
    if any(type(value) is not kinds[name] for name, value in asdict(facts).items()):
        return None
    # kill(2): 0 and negative pids are groups of processes; 1 is the machine's init.
    return facts if 1 < facts.pid <= _LARGEST_PID else replace(facts, pid=0)


def wait_for_facts(stream: BinaryIO, login_output: deque[str], send: Callable[[bytes], object]) -> NodeFacts:
    """Block for the facts on the remote stdout; lines of login scripts before them go to ``login_output``.

    ``send`` writes to the remote stdin what the node needs before that; it gets no bytes when the node has got some.

    Raises:
        EOFError: the stream ended without facts.
        OSError: more than 1 MiB came before them, or ``send`` has failed.
    """
    nbytes = 0
    answered: set[str] = set()
    while line := stream.readline(MAX_ANSWER_BYTES):
        facts = read_facts(line)
        if facts:
            return facts
        nbytes += len(line)
        if package.give(line, answered, send):
            continue
        if nbytes > _MAX_LOGIN_OUTPUT_BYTES:
            raise OSError("the login scripts print too much")
        login_output.append(line.decode("utf-8", "replace").rstrip())
    raise EOFError


def check_facts(host: str, facts: NodeFacts, start: RemoteStart, printed: Sequence[str] = ()) -> HostFailure | None:
    """The failure of a node with these facts; None if it can run the job. ``printed`` are lines of the login."""
    if facts.failed == "setup":
        said = "; ".join([line for line in printed if line.strip()][-_SHOWN_LINES:])[-_SHOWN_CHARS:]
        message = f"--remote-setup ended with exit code {facts.status}" + (f": {said}" if said else "")
        hint = f"Try it with `{start.login_command}`; append" if start.login_command else "Append"
        return HostFailure(host, "setup", message, f"{hint} `; true` if the failure is harmless.")
    if facts.failed == "python":
        hint = "Name one that every node has: --remote-python, or a --remote-setup that brings it into PATH."
        return HostFailure(host, "python", f"no {start.python}", hint)
    if tuple(map(int, re.findall(r"\d+", facts.python)[:2])) < _OLDEST_PYTHON:
        hint = "ddplaunch needs Python 3.10 on every node: --remote-python names another interpreter."
        return HostFailure(host, "python", f"{start.python} is Python {facts.python or 'of unknown version'}", hint)
    if facts.failed:
        hint = (
            "The launcher listens there for its agents. Open the port in its firewall, or select a network by which "
            "the nodes reach this machine: --local-addr, --interface."
        )
        return HostFailure(host, "start", f"it cannot connect to the launcher at {facts.error}", hint)
    return _check_packages(host, facts, start) or _check_files(host, facts, start)


def not_started(host: str, command: str, printed: Iterable[str], within_s: float | None = None) -> HostFailure:
    """The failure of a host on which ``command`` has started no agent, or not ``within_s``; it printed these lines."""
    words = last_words("; ".join(line for line in printed if line)) or "it printed nothing"
    within = "" if within_s is None else f" within {within_s:g} s"
    hint = "" if within_s is None else SLOW_HINT
    return HostFailure(host, "start", f"{command} did not start the agent{within}: {words}", hint)


def last_words(printed: str) -> str:
    """The end of ``printed``, of about 500 characters; it begins with a whole word."""
    if len(printed) <= _SHOWN_CHARS:
        return printed
    return "... " + re.sub(r"^\S*\s+", "", printed[-_SHOWN_CHARS:])


def _check_packages(host: str, facts: NodeFacts, start: RemoteStart) -> HostFailure | None:
    if facts.ddplaunch != __version__:
        message = f"ddplaunch cannot be loaded: {facts.error or f'it is {facts.ddplaunch}'}"
        hint = f"Make room in one of these folders, or `pip install ddplaunch=={__version__}` for {start.python} there."
        return HostFailure(host, "ddplaunch", message, hint)
    if start.needs_torch and not facts.torch:
        hint = f"Install torch for {start.python} there, or name another interpreter with --remote-python."
        return HostFailure(host, "torch", f"{start.python} has no torch", hint)
    return None


def _check_files(host: str, facts: NodeFacts, start: RemoteStart) -> HostFailure | None:
    if facts.directory and not start.gets_code:
        hint = "Every node must have the launcher's working directory; --chdir names another folder."
        return HostFailure(host, "directory", f"{start.cwd}: {facts.directory}", hint)
    if not facts.has_script:
        hint = "The script must be on every node under the same path, for example on a shared file system."
        return HostFailure(host, "script", f"no {start.script} in {start.cwd}", hint)
    return None


def _is_settable(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)) and not _SHELL_VARIABLES.fullmatch(name)


def _exit_with(failed: str) -> str:
    answer = shlex.quote(f'{FACTS_PREFIX.decode()}{{"failed": "{failed}", "status": %d}}\\n')
    return f"{{ status=$?; printf {shlex.quote(chr(92) + 'n')}{answer} $status; exit 1; }}"


def _encode(script: str) -> bytes:
    """The script as one line that ``printf %b`` decodes."""
    raw = script.encode("utf-8", "surrogateescape")
    return re.sub(rb"[^ -\[\]-~]", lambda match: b"\\0%03o" % match[0][0], raw) + b"\n"
