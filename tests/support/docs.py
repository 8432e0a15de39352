"""What README.md and docs/ show: tables that are made from the code, and screens that were really printed.

``python -m tests.support.docs`` (``scripts/refresh_docs``) writes them; ``tests/unit/test_docs.py`` and
``tests/process/test_doc_screens.py`` compare them with the code and with what is printed now.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_origin

from ddplaunch import config
from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.cli.options import OPTIONS
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, OutputConfig, RemoteConfig, RendezvousConfig, WorkerConfig
from ddplaunch.features import declarations, run_events
from ddplaunch.features.forwarding.rules import RULES
from ddplaunch.features.health.gpu_events import ACTIONS, XIDS, Xid
from ddplaunch.features.metrics.launcher import METRICS
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.protocol.environment import NAMES
from ddplaunch.text import fold_ints
from ddplaunch.timeouts import TimeoutConfig
from ddplaunch.worker.parts import WorkerPart
from tests.support.runs import ROOT

_AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = (*(ROOT / name for name in _AT_THE_TOP), *sorted((ROOT / "docs").glob("*.md")))

TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
SCREEN = re.compile(r"(<!-- screen: ([\w-]+) -->\n```\w+\n)(.*?)(```\n)", re.DOTALL)

CUT = "  ..."
"""A line of a screen that stands for lines that are left out."""


# Tables.


def table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    head, *body = (
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in (columns, *rows)
    )
    return "".join((head, f"|{'---|' * len(columns)}\n", *body))


def options() -> str:
    """Every option that ``--help`` shows, under its headings."""
    parts = []
    for heading, group in OPTIONS.items():
        rows = (
            (f"`{', '.join(option.names.split())}{f' {option.metavar}' if option.metavar else ''}`", option.text)
            for option in group
            if not option.hidden
        )
        parts.append(f"### {heading}\n\n{table(('option', 'meaning'), rows)}")
    return "\n".join(parts)


def forwarding() -> str:
    """Which variables workers on other machines get."""
    cells = {"always": "yes", "requested": "`-x NAME`, `-x 'PRE*'`", "named": "`-x NAME`", "never": "no"}
    rows = (
        (
            "anything else" if rule.names == ("*",) else ", ".join(f"`{name}`" for name in rule.names),
            cells[rule.when],
            rule.why,
        )
        for rule in RULES
    )
    return table(("variable", "forwarded", "why"), rows)


def xids() -> str:
    """Xid errors; those that mean the same share a row."""
    numbers: dict[Xid, list[int]] = {}
    for number, known in XIDS.items():
        numbers.setdefault(known, []).append(number)
    rows = (
        (fold_ints(which), known.meaning, known.action, "yes" if known.is_fault else "")
        for known, which in numbers.items()
    )
    return table(("Xid", "meaning", "action", "fault"), rows)


def methods_of(part: type) -> str:
    """The methods of a class that subclasses define, each with the first line of its docstring."""
    rows = (
        (f"`{_signature(name, member)}`", (inspect.getdoc(member) or "").partition("\n")[0].replace("``", "`"))
        for name, member in vars(part).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    )
    return table(("method", "what it does or is told"), rows)


def _signature(name: str, member: object) -> str:
    if isinstance(member, property):
        return f"{name}: {inspect.signature(member.fget).return_annotation}"  # type: ignore[arg-type]
    return name + re.sub(r"\(self(, )?", "(", str(inspect.signature(member))).replace("'", "")  # type: ignore[arg-type]


def services_of(offer: type) -> str:
    """What a named tuple has, from its docstring's ``Attributes``."""
    return table(("service", "what it is"), ((f"`{name}`", text) for name, text in _attributes(offer).items()))


def fields_of(record: type) -> str:
    """The fields of a dataclass: types and defaults as in the code, meanings from its docstring's ``Attributes``."""
    meanings = {name: meaning for each in record.__mro__ for name, meaning in _attributes(each).items()}
    own_first = sorted(dataclasses.fields(record), key=lambda field: field.name not in record.__annotations__)
    rows = ((f"`{field.name}`", _type(str(field.type)), _default(field), meanings[field.name]) for field in own_first)
    return table(("field", "type", "default", "meaning"), rows)


def _attributes(record: type) -> dict[str, str]:
    text = (inspect.getdoc(record) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.MULTILINE))
    return {name: " ".join(meaning.split()).replace("``", "`").removesuffix(".") for name, meaning in meanings.items()}


def _type(text: str) -> str:
    """A type as its annotation has it, with the values of a ``Literal`` in place of its name."""
    named = {name: value for name, value in vars(config).items() if get_origin(value) is Literal}
    text = re.sub(r"\w+", lambda match: str(named.get(match[0], match[0])).removeprefix("typing."), text)
    return "`" + re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace(", ", " | "), text).replace("'", '"') + "`"


def _default(field: dataclasses.Field[object]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory.__name__}()`"
    return "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`".replace("'", '"')


def declared(name: str) -> Iterator[tuple[str, str]]:
    """Rows with what all features declare, the kinds and keys of the core's events first."""
    for word, text in {**getattr(run_events, name), **declarations(name)}.items():
        yield f"`{word}`", text


TABLES: dict[str, Callable[[], str]] = {
    **{
        record.__name__: functools.partial(fields_of, record)
        for record in (LaunchConfig, WorkerConfig, OutputConfig, TimeoutConfig, RemoteConfig, RendezvousConfig, Host)
    },
    "options": options,
    "forwarding": forwarding,
    "event-fields": lambda: table(("key", "value"), declared("EVENT_KEYS")),
    "event-kinds": lambda: table(("event", "what has happened"), declared("EVENTS")),
    "environment": lambda: table(("variable", "value"), iter(NAMES.items())),
    "metrics": lambda: table(
        ("metric", "type", "meaning"), ((f"`{each.name}`", each.kind, each.meaning) for each in METRICS)
    ),
    "methods-of-part": lambda: methods_of(Part),
    "methods-of-watch": lambda: methods_of(Watch),
    "methods-of-worker-part": lambda: methods_of(WorkerPart),
    "services-of-node": lambda: services_of(NodeServices),
    "services-of-run": lambda: services_of(RunServices),
    "xid-actions": lambda: table(("action", "what to do"), ((f"`{name}`", text) for name, text in ACTIONS.items())),
    "xids": xids,
}


def with_tables(text: str) -> str:
    """A page with its tables as the code has them now."""
    return TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[4]}", text)


# Screens.


@dataclass(frozen=True)
class Screen:
    """How a screen is made.

    Attributes:
        drop: lines in which this is found are left out.
        is_cut_shown: lines left out in a row become one ``CUT``.
        before: shell text that runs first; its output is not shown.
        after: shell text that runs last; its output is not shown.
        is_table: columns get the width that the lines shown need.
        environ: variables beside the few that every screen has.
    """

    drop: str = "(?!)"
    is_cut_shown: bool = True
    before: str = ""
    after: str = ""
    is_table: bool = False
    environ: dict[str, str] = field(default_factory=dict)


_BEFORE_PAGE = r"^ddplaunch: (\d|dry run)|^\["

_NOISE = r"takes long: |could not be inspected"
"""Lines that only a busy machine or a container shows."""

_JOBS = """
train() {
    ddplaunch --rdzv-id $1 --nproc-per-node 2 scripts/examples/train_digits.py --cpu --epochs 100000 &
    until ddplaunch --ps | grep -q "$1 .*2 workers"; do sleep 0.5; done
}
train job6
kill -STOP $(pgrep -P $! | head -n 1)
kill -KILL $!
train job7
"""

SCREENS = {
    "first-run": Screen(drop=r"\[rank1\]:   |\[rank0\]: "),
    "failure": Screen(drop=_BEFORE_PAGE),
    "hang": Screen(drop=_BEFORE_PAGE),
    "inject": Screen(),
    "plan": Screen(environ={"WANDB_API_KEY": "secret"}),
    "ps": Screen(
        drop=r"^(?!run |job[67] |ddplaunch: )",
        is_cut_shown=False,
        before=_JOBS,
        after="ddplaunch --kill job6",
        is_table=True,
    ),
    "report": Screen(),
}

REPORT = (
    "ddplaunch --nproc-per-node 1 scripts/examples/train_digits.py --cpu --fail-at-epoch 2 --fail-rank 0 >&/dev/null\n"
    "cat ~/.local/state/ddplaunch/*/report.json"
)
"""The one screen that shows no command."""


def commands(screen: str) -> list[str]:
    """The commands that a screen shows, with their continuation lines, as they stand there."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)\n", screen, re.MULTILINE)


def printed(name: str, text: str) -> str:
    """What the commands of the screen ``text`` print now, with them, in its generic form; nothing is left out."""
    screen = SCREENS[name]
    shown = commands(text)
    with tempfile.TemporaryDirectory() as folder:
        script = "".join(f"cat <<'COMMAND'\n$ {line}\nCOMMAND\n{line}\n" for line in shown) or REPORT
        hidden = "exec 9>&1 >/dev/null 2>&1"
        body = f"{hidden}\n{screen.before}\nexec >&9 2>&9 9>&-\n{script}\n{hidden}\n{screen.after}"
        done = subprocess.run(
            ["bash", "-c", body.replace("/tmp/", f"{folder}/tmp/")],
            cwd=ROOT,
            env=_environ(Path(folder), screen.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
            preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),  # "on the 2 CPUs"
        )
        return _generic(done.stdout.decode(), folder)


def _environ(folder: Path, more: dict[str, str]) -> dict[str, str]:
    """Little of this process's environment: a plan shows what is forwarded of it."""
    (folder / "tmp").mkdir()
    (folder / "bin").mkdir()
    start = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom ddplaunch.__main__ import main\n\nmain()\n"
    (folder / "bin" / "ddplaunch").write_text(f"#!{sys.executable}\n{start}")
    (folder / "bin" / "ddplaunch").chmod(0o755)
    # `source .venv/bin/activate` has no effect here: bash takes `source` for the function.
    kept = {name: os.environ[name] for name in ("LANG", "DDPLAUNCH_TEST_MARK") if name in os.environ}
    path = f"{folder}/bin:{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(folder), "BASH_FUNC_source%%": "() { :\n}", **more}


def _generic(text: str, folder: str) -> str:
    """The paths and the host name of this machine become those of the docs."""
    for here, shown in (
        (f"{folder}/tmp/", "/tmp/"),
        (sys.executable, "/home/ada/ddplaunch/.venv/bin/python"),  # In scripts of a venv, python3.
        (sys.prefix, "/home/ada/ddplaunch/.venv"),
        (str(ROOT), "/home/ada/ddplaunch"),
        (folder, "/home/ada"),
    ):
        text = text.replace(here, shown)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", text)


def cut(name: str, text: str) -> str:
    """What a screen shows of all that was printed."""
    screen = SCREENS[name]
    lines: list[str] = []
    is_command = False
    for line in text.splitlines():
        if re.search(_NOISE, line):
            continue
        is_command = line.startswith("$ ") or (is_command and bool(lines) and lines[-1].endswith("\\"))
        if is_command or not re.search(screen.drop, line):
            lines.append(line)
        elif screen.is_cut_shown and lines and lines[-1] != CUT:
            lines.append(CUT)
    return "".join(f"{line}\n" for line in (_aligned(lines) if screen.is_table else lines))


def _aligned(lines: list[str]) -> list[str]:
    """The host's name and rows that are left out had other widths."""
    rows = {index: re.split(r"  +", line) for index, line in enumerate(lines) if "  " in line}
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    pad = lambda cells: "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()  # noqa: E731
    return [pad(rows[index]) if index in rows else line for index, line in enumerate(lines)]


def masked(line: str) -> str:
    """The line without what differs from run to run: run ids, numbers, widths of columns."""
    line = re.sub(r"\d{8}-\d{6}-[0-9a-f]{6}", "RUN", line)
    return " ".join(re.sub(r"\d[\d.:,]*", "0", line).split())


def main() -> None:
    """Write all tables, and the screens that the arguments name: none with ``--tables``, all without arguments."""
    names = sys.argv[1:] or list(SCREENS)
    for page in PAGES:
        text = with_tables(page.read_text())
        for match in [match for match in SCREEN.finditer(text) if match[2] in names]:
            print(f"{page.name}: {match[2]}", flush=True)
            text = text.replace(match[0], match[1] + cut(match[2], printed(match[2], match[3])) + match[4])
        page.write_text(text)


if __name__ == "__main__":
    main()
