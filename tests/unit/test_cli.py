"""Command line -> ``LaunchConfig`` -> ``launch`` -> exit code, with ``launch`` replaced by one that only looks."""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete

from ddplaunch.cli import main
from ddplaunch.cli.parser import normalize
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import USAGE
from ddplaunch.features.faults.fault_spec import GRAMMAR
from ddplaunch.features.warm import keeper_files
from ddplaunch.rows import load
from ddplaunch.system import run_tags
from tests.support import command_lines, golden
from tests.support.configs import GROUP_OF, GROUPS

Launched = list[LaunchConfig]
DECLARED = [option for options in main.command.groups.values() for option in options]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The configs that reached ``launch``, in an environment that sets no option."""
    configs: Launched = []

    def launch(config: LaunchConfig, **_: object) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(exit_code=7)

    _launch_is(monkeypatch, launch)
    for name in [n for n in os.environ if n.startswith(("PET_", "TORCH", "PYTHON_EXEC", "_DDPLAUNCH"))]:
        monkeypatch.delenv(name)
    return configs


def _launch_is(monkeypatch: pytest.MonkeyPatch, launch: Callable[[LaunchConfig], Any]) -> None:
    monkeypatch.setitem(sys.modules, "ddplaunch.launcher.launch", SimpleNamespace(launch=launch))


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def config_of(launched: Launched) -> Callable[..., LaunchConfig]:
    def config_of(*argv: str) -> LaunchConfig:
        assert run(*argv, "x.py") == 7
        return launched.pop()

    return config_of


ConfigOf = Callable[..., LaunchConfig]

DATA = Path(__file__).parent / "data"


def _listed(file: str) -> set[str]:
    """The names of a file whose lines are ``where they are tested: NAME ...``."""
    return {name for line in (DATA / file).read_text().splitlines() for name in line.rpartition(": ")[2].split()}


TESTED_ELSEWHERE = _listed("options_tested_elsewhere.txt")
"""Options that cannot be given alone, or run no script."""
SET_ELSEWHERE = _listed("fields_set_elsewhere.txt")
"""Fields that no option of ``options.txt`` sets."""


def _spellings(name: str, value: str) -> Iterator[list[str]]:
    for spelled in {f"--{name}", f"--{name.replace('-', '_')}"}:
        yield from ([[spelled, value], [f"{spelled}={value}"]] if value else [[spelled]])


def _option_of(question: str) -> tuple[str, str]:
    """Its name and its value."""
    spelled, *value = question.split()[1:-1]
    return spelled.removeprefix("--"), "".join(value)


def test_every_option_has_an_effect_or_a_reason_however_it_is_given(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option is forgotten on its way to the config, and no field is out of the user's reach.

    torchrun: test_run 5, 19.
    """
    reached: set[str] = set()

    def effect(question: str) -> str:
        name, value = _option_of(question)
        asked = [config_of(*argv) for argv in _spellings(name, value)]
        [option] = [o for o in DECLARED if o.name == name.replace("-", "_")]
        if option.pet_variable:
            with monkeypatch.context() as patch:
                patch.setenv(option.pet_variable, value or "1")
                asked.append(config_of())
        told = {*map(command_lines.changes, asked)}
        assert len(told) == 1
        reached.update(re.findall(r"(?:^|; )(\w+)=", *told))
        return told.pop()

    golden.check_answers("options", effect)
    assert {option.name for option in DECLARED} == {*map(_key, golden.questions("options")), *TESTED_ELSEWHERE}
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    assert {*reached, *SET_ELSEWHERE, *GROUPS} == {*GROUP_OF, *fields}


def _key(question: str) -> str:
    return _option_of(question)[0].replace("-", "_")


@pytest.mark.parametrize(("task", "is_shown"), [(None, True), ("0", True), ("3", False)])
def test_a_usage_error_is_shown_by_the_first_of_many_launchers(
    task: str | None, is_shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if task:
        monkeypatch.setenv("SLURM_PROCID", task)
    for argv in (["--nproc-per-node", "none", "x.py"], ["--no-such-option"]):
        with pytest.raises(SystemExit) as end:
            main.main(argv)
        assert end.value.code == USAGE
        assert ("ddplaunch: error: " in capsys.readouterr().err) is is_shown


def test_an_option_whose_value_may_be_missing() -> None:
    """A question is a command line; its answer, the options as click gets them, and the rest."""
    golden.check_answers("optional_values", lambda words: normalize(main.command.params, words.split()))


@pytest.mark.parametrize("question", golden.questions("options"))
def test_an_empty_value_is_an_error_or_none_at_all(
    question: str, capsys: pytest.CaptureFixture[str], launched: Launched
) -> None:
    """As from ``--master-port=$PORT`` in a shell where PORT is not set."""
    name, value = _option_of(question)
    if not value or name in ("role", "line-prefix"):
        return
    if run(f"--{name}=", "x.py") == USAGE:
        assert f"ddplaunch: error: --{name}" in capsys.readouterr().err
    else:
        assert launched.pop() == LaunchConfig(script="x.py")


def test_what_a_command_line_means_or_why_it_is_refused(
    launched: Launched, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is one sentence and a hint.

    torchrun: test_run 2, 3, 4, 5, 6, 11, 12, 16, 18; launch_test 1, 2; argparse_util_test 1, 2;
    shutdown_timeout_test 1; rendezvous 2, 7, 8, 9.
    """
    monkeypatch.chdir(tmp_path)
    Path("file").touch()

    def meaning(question: str) -> str:
        environ, argv = command_lines.parsed(question)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            code = run(*argv)
        out, err = capsys.readouterr()
        assert not out
        if code == 7:
            return command_lines.changes(launched.pop())
        assert code == USAGE
        assert re.fullmatch(r"ddplaunch: error: .+\n(  hint: .+\n)?", err)
        return err.strip().replace("\n  hint: ", " | ")

    golden.check_answers("command_lines", meaning)


def test_file_timers_are_warned_about(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun: local_elastic_agent_test 5; timer 1."""
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    config_of()
    err = capsys.readouterr().err
    assert err.startswith("ddplaunch: warning: TORCHELASTIC_ENABLE_FILE_TIMER")
    assert err.count("\n") == 1


def test_all_that_torchruns_own_parser_accepts_is_accepted() -> None:
    """Every option, every abbreviation that is one there, and every PET name, of the torchrun that is installed."""
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    with click.Context(main.command, help_option_names=["--help"]) as ctx:
        ours = {name: param for param in main.command.get_params(ctx) for name in param.opts}
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    assert len(actions) > 25
    for action in actions:
        reads_environment = isinstance(action, (env, check_env))
        name = f"--{action.dest.replace('_', '-')}"
        assert getattr(ours[name], "pet_variable", "") == (f"PET_{action.dest.upper()}" if reads_environment else "")
        for typed in _typed(parser, action):
            value = [] if action.nargs == 0 else ["some value"]
            assert normalize(ours.values(), [typed, *value, "x.py"]) == (["=".join([name, *value])], ["x.py"])


def _typed(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    """What may be typed for ``action``: its names, and their beginnings that argparse finds unambiguous."""
    for name in action.option_strings:
        yield name
        for end in range(3, len(name)):
            found = parser._get_option_tuples(name[:end])
            if len(found) == 1 and name[:end] not in parser._option_string_actions:
                assert found[0][0] is action
                yield name[:end]


def test_the_short_help_fits_a_screen_and_names_the_other_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-h", "x.py") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) <= 80
    assert "--help" in lines[-1]


def test_the_folder_of_the_documentation_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--docs") == 0
    assert (Path(capsys.readouterr().out.strip()) / "options.md").is_file()


@pytest.mark.parametrize("argv", [["--help"], ["--hel"], ["--nproc-per-node", "0", "--help", "x.py"]])
def test_help_fits_80_columns_and_shows_every_option(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 0
    page = capsys.readouterr().out
    assert max(len(line) for line in page.splitlines()) <= 80
    assert page.startswith("Usage: ddplaunch [OPTIONS] SCRIPT [ARGS]...")
    for option in DECLARED:
        assert option.help
        assert (option.opts[-1] in page) is not option.hidden
    for heading in (*main.OPTIONS, *main.AFTER_OPTIONS, "  Examples"):
        assert f"\n{heading}:\n" in page


def test_version_names_torch_without_importing_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert re.fullmatch(
        r"ddplaunch \S+ \((commit [0-9a-f]{7}, )?torch \S+, Python 3\.\d+\.\d+\)\n", capsys.readouterr().out
    )


@pytest.mark.parametrize("argv", [["--inject", "help"], ["--inject=exit rank=1", "--inject", "help", "x.py"]], ids=str)
def test_help_as_the_value_of_an_option_prints_what_it_may_be(
    argv: list[str], launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 0
    assert capsys.readouterr() == (GRAMMAR + "\n", "")
    assert not launched


def test_a_bug_shows_its_traceback_and_asks_for_a_report(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _launch_is(monkeypatch, lambda _config, **_: 1 / 0)
    assert run("x.py") == 80
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "report it" in err.splitlines()[-1]
    assert "ddplaunch --version" in err.splitlines()[-1]


@pytest.mark.parametrize("where", ["launch", "parse"])
def test_ctrl_c_outside_a_run_is_130(
    where: str, launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if where == "launch":
        _launch_is(monkeypatch, interrupted)
    else:
        monkeypatch.setattr(main, "build_config", interrupted)
    assert run("x.py") == 130
    assert not capsys.readouterr().err.strip()


class _Unread(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_the_exit_code_survives_a_stderr_that_nobody_reads(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Unread())
    assert run("--bogus") == 2


def completed(args: list[str], incomplete: str = "") -> list[str]:
    shell = BashComplete(main.command, {}, "ddplaunch", "_DDPLAUNCH_COMPLETE")
    return [item.value for item in shell.get_completions(args, incomplete)]


def test_shells_complete_options_values_and_files() -> None:
    """A question ends with the word that was begun."""

    def offered(question: str) -> str:
        *args, incomplete = shlex.split(question)
        shell = BashComplete(main.command, {}, "ddplaunch", "_DDPLAUNCH_COMPLETE")
        found = shell.get_completions(args[1:], incomplete)
        return " ".join(item.value if item.type == "plain" else f"a {item.type}" for item in found) or "nothing"

    golden.check_answers("completions", offered)
    assert {*completed([], "-")} >= {option.opts[-1] for option in DECLARED if not option.hidden} | {"--help"}


def test_what_completes_an_option_exists() -> None:
    named = {option.row.completes for option in DECLARED if isinstance(option.row.completes, str)}
    assert len(named) > 4
    assert all(callable(load(name)) for name in named - {"file", "folder"})


def test_shells_complete_the_ids_of_runs_after_kill_and_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the run that contains the shell, which --kill refuses."""
    tags = ("zz7.3f09ac.12", "zz7.3f09ac.1", "20261120-193012-a1b2c3", "not a tag")
    waiting = [subprocess.Popen(["sleep", "60"], env={**os.environ, "DDPLAUNCH_RUN_ID": tag}) for tag in tags]
    try:
        assert {"zz7", "20261120-193012-a1b2c3"} <= {*completed(["--kill"])}
        assert completed(["--kill"], "zz") == completed(["--stacks"], "zz") == ["zz7"]
        assert completed([], "--kill=zz") == ["zz7"]
        monkeypatch.setenv("DDPLAUNCH_RUN_ID", tags[0])
        assert completed(["--kill"], "zz") == []
    finally:
        for process in waiting:
            process.kill()
            process.wait()


def test_kill_completes_to_what_keep_warm_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert completed(["--kill"], "wa") == []
    (tmp_path / "ddplaunch").mkdir()
    keeper_files.in_base(tmp_path / "ddplaunch").touch()
    assert (completed(["--kill"], "wa"), completed(["--stacks"], "wa")) == (["warm"], [])


def test_the_id_on_which_nodes_have_agreed_is_completed() -> None:
    """Where each node has a launcher, its run tag contains the id that this launcher had made."""
    own = f"zz8-{os.getpid()}"
    with run_tags.launcher_memfd(f"{own}.3f09ac"), run_tags.launcher_memfd(f"{own}.3f09ac", f"{own}-agreed"):
        waiting = subprocess.Popen(["sleep", "60"], env={**os.environ, "DDPLAUNCH_RUN_ID": f"{own}.3f09ac.1"})
        try:
            assert completed(["--kill"], own) == [f"{own}-agreed"]
        finally:
            waiting.kill()
            waiting.wait()


def test_the_completion_script_is_ddplaunchs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_DDPLAUNCH_COMPLETE", "zsh_source")
    assert run() == 0
    assert "ddplaunch" in capsys.readouterr().out
