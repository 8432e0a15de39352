"""README.md, docs/ and the program agree."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch import LaunchConfig, errors
from ddplaunch.cli import main, rendezvous_options
from ddplaunch.cluster.scheduled import SlurmJob
from ddplaunch.features.faults import fault_spec
from ddplaunch.features.forwarding.rules import RULES
from ddplaunch.features.health import rules
from ddplaunch.features.schedulers import table as schedulers
from ddplaunch.features.usage.quantities import QUANTITIES
from ddplaunch.launcher.display import report_files
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol import results, run_result
from ddplaunch.protocol.launcher_agent import AttemptStarted
from ddplaunch.protocol.results import HealthFinding
from tests.support import docs
from tests.support.docs import PAGES
from tests.support.runs import ROOT
from tests.support.watches import run_services

README = ROOT / "README.md"
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def read(name: str) -> str:
    return (ROOT / name).read_text()


def section(name: str, title: str) -> str:
    return re.split(rf"^#+ {re.escape(title)}\n", read(name), maxsplit=1, flags=re.MULTILINE)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of tables."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines if not line.startswith("---")]


def test_readme_is_read_in_a_few_minutes():
    assert len(read("README.md").splitlines()) < 200


@pages
def test_lines_of_prose_fit_into_120_columns(page: Path):
    """Not those of tables, code and screens, and no heading that is a message."""
    prose = re.sub(r"^```.*?^```|^ *\|.*?$|^### `.*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120] == []


# Links.


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


@pages
def test_no_link_is_dead(page: Path):
    for target, anchor in links(page):
        assert target.exists(), target
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), (target, anchor)


def test_every_page_is_linked_from_the_readme():
    assert set(PAGES) - {README} <= {target for target, _ in links(README)}


# Tables.


@pages
def test_tables_are_those_of_the_code(page: Path):
    """Where this fails: ``scripts/refresh_docs --tables``."""
    assert page.read_text() == docs.with_tables(page.read_text())


def test_every_table_and_every_screen_is_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert {match[2] for match in docs.TABLE.finditer(text)} == docs.TABLES.keys()
    assert {match[2] for match in docs.SCREEN.finditer(text)} == docs.SCREENS.keys()


def test_the_table_of_forwarded_variables_has_a_row_for_each_rule():
    table = rows(docs.forwarding())[1:]
    assert [row[2] for row in table] == [rule.why for rule in RULES]
    assert table[-1][0] == "anything else"


OUR_EXIT_CODES = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}


@pytest.mark.parametrize("title", ["Exit codes", "What a scheduler should do"])
def test_the_exit_codes_of_the_tables_are_ours(title: str):
    codes = {int(row[0]) for row in rows(section("docs/exit-codes.md", title)) if row[0].isdigit()}
    assert codes == {0, *OUR_EXIT_CODES}


def test_the_examples_for_schedulers_do_what_the_table_says():
    text = section("docs/exit-codes.md", "What a scheduler should do")
    contract = {int(row[0]): row[3:] for row in rows(text) if row[0].isdigit()}
    assert codes_after(r"RequeueExit=", text) == codes_after(r"case \$code in\n", text) == found(contract, 0, "requeue")
    assert codes_after(r"RequeueExitHold=", text) == codes_after(r";;\n", text) == found(contract, 0, "hold")
    assert codes_after(r"values: \[", text) - {1} == found(contract, 1, "`FailJob`")


def found(contract: dict[int, list[str]], column: int, word: str) -> set[int]:
    return {code for code, cells in contract.items() if cells[column].startswith(word)}


def codes_after(begin: str, text: str) -> set[int]:
    """The codes of a list with ranges, like ``82-84,88`` or ``82 | 88``."""
    listed = re.search(rf"{begin}([-\d,| ]+)", text)
    assert listed
    ranges = [item.split("-") for item in re.split(r"[,| ]+", listed[1].strip())]
    return {code for bounds in ranges for code in range(int(bounds[0]), int(bounds[-1]) + 1)}


@pytest.mark.features
def test_the_table_of_schedulers_is_the_one_in_the_code():
    table = [row for row in rows(read("docs/slurm-and-schedulers.md")) if row[1].startswith("`")]
    assert [row[1].strip("`") for row in table if row[1] != "`--cluster`"] == [row.word for row in schedulers.TABLE]
    for shown, row in zip((row for row in table if row[1] != "`--cluster`"), schedulers.TABLE, strict=True):
        assert set(row.variables) <= set(re.findall(r"\w+", shown[2]))


def test_the_table_of_rdzv_conf_is_the_one_in_the_code():
    keys = {
        key for row in rows(section("docs/multi-node.md", "`--rdzv-conf`")) for key in re.findall(r"`(\w+)`", row[0])
    }
    assert keys == set(rendezvous_options.EFFECTIVE)


def test_the_rules_about_hardware_are_those_of_the_code():
    """Besides what breaks them, and who has a like one: that only the page says."""
    told = {row[0]: row for row in rows(read("docs/gpu-health.md")) if len(row) > 4}
    yes = lambda is_it: "yes" if is_it else ""  # noqa: E731
    known = {
        f"`{rule.name}`": [rule.severity, yes(rule.is_fault), yes(rule.in_run), rule.action] for rule in rules.RULES
    }
    assert {name: row[2:-1] for name, row in told.items() if len(row) > 6 and name != "rule"} == known
    of_ports = re.findall(r'_port_finding\(\s*"([a-z-]+)"', inspect.getsource(rules))
    assert [name.strip("`") for name, row in told.items() if len(row) < 6 and name != "rule"] == of_ports


def test_the_table_of_faults_is_the_one_in_the_code():
    forms = [row[0].strip("`") for row in rows(read("docs/fault-injection.md"))][1:]
    assert len(forms) == len(fault_spec.GRAMMAR.splitlines()) - 1
    for form, line in zip(forms, fault_spec.GRAMMAR.splitlines(), strict=False):
        assert line.startswith(f"{form} ")


# report.json.


def fields(record: type, more: tuple[str, ...] = ()) -> list[str]:
    return [*more, *(field.name for field in dataclasses.fields(record))]


REPORT = {
    "The run": fields(run_result.RunResult, ("schema",)),
    "An attempt": fields(results.AttemptResult),
    "A worker": fields(results.WorkerExit),
    "Versions": fields(run_result.Versions),
    "A node": fields(run_result.NodeOfRun),
    "A finding": fields(HealthFinding),
    "An injected fault": fields(run_result.Injected),
    "A SLURM job": fields(SlurmJob),
}


@pytest.mark.parametrize("title", REPORT)
def test_the_keys_of_the_report_are_those_of_the_code(title: str):
    keys = [row[0].strip("`") for row in rows(section("docs/report-json.md", title))]
    assert keys == ["key", *REPORT[title]]


def test_the_example_of_a_report_has_all_keys():
    text = re.search(r"```json\n(.*?)```", read("docs/report-json.md"), re.DOTALL)
    assert text
    report = json.loads(text[1])
    attempt = report["attempts"][0]
    assert report["schema"] == report_files.SCHEMA
    assert [*report] == REPORT["The run"]
    assert [*attempt] == REPORT["An attempt"]
    assert [*attempt["exits"][0]] == [*report["first_failure"]] == REPORT["A worker"]


def test_the_values_of_samples_are_those_of_the_code():
    text = section("docs/samples.md", "The files")
    told = set(re.findall(r"`([nwg]\.[a-z]+)`", text))
    assert told == {f"{each.part}.{each.key}" for each in QUANTITIES} | {"g.throttle"}


# Options and examples.


def test_the_code_of_the_guides_is_that_of_programs_which_are_run():
    runs = read("scripts/lib/compat/run_all.py")
    named = re.findall(r"`scripts/lib/compat/(guides/\w+\.py)`", read("docs/guides.md"))
    assert named
    assert all(f'"{name}"' in runs for name in named)
    programs = [read(f"scripts/lib/compat/{name}") for name in named] + [read("scripts/examples/train_digits.py")]
    for block in re.findall(r"^```python\n(.*?)^```", read("docs/guides.md"), re.DOTALL | re.MULTILINE):
        assert any(block in program for program in programs), block


OF_OTHERS = set(re.findall(r"--[a-z-]+", read("tests/unit/data/options_of_others.txt")))


@pages
def test_every_option_on_a_page_is_one_of_ours_or_known_to_be_anothers(page: Path):
    ours = {name for option in main.command.params for name in option.opts if name.startswith("--")} | {"--help"}
    example = {f"--{name}" for name in re.findall(r'"--([a-z-]+)"', read("scripts/examples/train_digits.py"))}
    named = {name.replace("_", "-") for name in re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]", page.read_text())}
    assert named - ours - example - OF_OTHERS == set()


def shown_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every command that a page shows, in a block or in a line of text."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = [line.removeprefix("$ ") for line in blocks.splitlines() if not re.match(r"\[|ddplaunch:|[| ]", line)]
    lines += re.findall(
        r"`([^`\n]*\bddplaunch [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    for line in lines:
        if re.search(r"(^| )ddplaunch ", line) and "[OPTIONS]" not in line:
            words = shlex.split(line, comments=True)
            if "ddplaunch" in words:
                yield words[words.index("ddplaunch") + 1 :]


COMMANDS = list(dict.fromkeys(tuple(words) for page in PAGES for words in shown_commands(page)))


def test_the_example_of_a_fault_can_be_pasted_where_the_readme_begins():
    (example,) = (
        line for line in read("README.md").splitlines() if line.startswith("ddplaunch") and "--inject" in line
    )
    assert (ROOT / shlex.split(example)[-1]).is_file()


def test_examples_are_found():
    assert len(COMMANDS) >= 40


def test_every_example_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "hosts.txt").write_text("gpu1 slots=4\ngpu2 slots=4\n")
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "MY_NAME"):
        monkeypatch.setenv(name, "x")
    at_once = {"--ps", "--kill", "--stacks", "--forget", "--check", "--attach", "--leave", "--logs", "--wait"}
    for words in COMMANDS:
        if not (at_once | {"--page", "--serve"}) & {*words}:  # They act at once.
            assert is_understood(words), words


def is_understood(words: tuple[str, ...]) -> bool:
    shown = main.command.main([*words], prog_name="ddplaunch", standalone_mode=False)
    return shown == 0 if {"--plan", "--version"} & {*words} else isinstance(shown, (LaunchConfig, tuple))


@pages
def test_the_examples_in_python_run(page: Path, monkeypatch: pytest.MonkeyPatch):
    """Only ``launch`` does nothing."""
    launched: list[object] = []

    def launch(target: object, _args: object = (), **options: object) -> run_result.FunctionResult:
        launched.append(target)
        assert options.keys() <= {param.name for param in main.command.params}
        result = run_result.FunctionResult("run", 0, "succeeded", 1.0, return_values={0: 0.2})
        object.__setattr__(result, "jobs", ())
        return result

    monkeypatch.setattr(ddplaunch, "launch", launch, raising=False)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    examples = [block for block in blocks if "ddplaunch" in block]  # The others are parts of scripts.
    for example in examples:
        exec(example, {"__name__": "__main__"})
    assert len(launched) == len(examples)


def test_the_timer_of_the_page_about_features_runs_from_the_first_attempt_on():
    [example] = re.findall(r"^```py\n(class .*?)^```$", read("docs/adding-a-feature.md"), re.DOTALL | re.MULTILINE)
    names = {"Watch": Watch, "RunServices": RunServices, "AttemptStarted": AttemptStarted}
    exec(example, found := {**names, "NEVER": NEVER, "Level": errors.Level, "time": time})
    shown: list[str] = []
    watch = found["Reminder"](run_services(LaunchConfig(script="x.py"), show=lambda text, *_: shown.append(text)))
    assert watch.run_due(time.monotonic()) == NEVER
    watch.on_event(0, AttemptStarted(0, 1, (1,), 0, 1, 0))
    due = watch.run_due(time.monotonic())
    assert not shown
    assert watch.run_due(due) == due + 3600
    assert shown == ["the job still runs"]


# Names of files and of code.


@pages
def test_files_that_a_page_names_exist(page: Path):
    for name in re.findall(r"`([\w/]+\.(?:py|sbatch))`", page.read_text().replace("/NAME/", "/ssh/")):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "ddplaunch", ROOT / "scripts" / "bench")), name


for_developers = pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/adding-a-feature.md"]
)


@for_developers
def test_files_and_folders_that_a_page_for_developers_names_exist(page: str):
    for path in re.findall(r"`([\w.-]+/[\w./-]+)`", read(page)):
        if not path.startswith(("build/", "dist/")):  # They are made.
            example = path.replace("NAME", "ssh")
            assert any((folder / example).exists() for folder in (ROOT, ROOT / "ddplaunch")), path


@for_developers
def test_names_of_code_on_a_page_for_developers_exist(page: str):
    folders = ("ddplaunch",) if page == "docs/architecture.md" else ("ddplaunch", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    source = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    quoted = re.findall(r"`((?:\w+\.)?\w+)`", re.sub(r"(?ms)^```.*?^```$", "", read(page)))
    named = {word for text in quoted for word in text.split(".") if not text.endswith((".py", ".json"))}
    assert named - source - {"vVERSION"} == set()


@for_developers
def test_names_of_code_on_a_page_for_developers_are_in_the_files_that_it_names(page: str):
    for name, file in re.findall(r"`([\w.]+)` (?:in|of) `([\w/]+\.py)`", " ".join(read(page).split())):
        path = file if file.startswith("tests/") else f"ddplaunch/{file}"
        assert {*name.split(".")} <= {*re.findall(r"\w+", read(path))}, (name, file)
