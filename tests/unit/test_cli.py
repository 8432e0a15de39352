"""Command line -> ``LaunchConfig`` -> ``launch`` -> exit code, with ``launch`` replaced by one that only looks."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.shell_completion import BashComplete

from ddplaunch.cli import completion, main
from ddplaunch.cli.parser import normalize
from ddplaunch.cluster import schedulers
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, Streams
from ddplaunch.errors import USAGE, LaunchError, UsageError
from ddplaunch.features.warm import keeper_files
from ddplaunch.rows import load
from ddplaunch.system import run_tags
from tests.support.configs import GROUP_OF, GROUPS, setting

if TYPE_CHECKING:
    import argparse

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


@pytest.fixture
def error_of(launched: Launched, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a refused command line prints, checked for its shape."""

    def error_of(*argv: str) -> str:
        assert run(*argv) == 2
        assert not launched
        out, err = capsys.readouterr()
        assert re.fullmatch(r"ddplaunch: error: .+\n(  hint: .+\n)?", err)
        assert not out
        return err

    return error_of


ConfigOf = Callable[..., LaunchConfig]
ErrorOf = Callable[..., str]

# Every option: a value that is not the default, and the field it changes; None where nothing may change.
EFFECTS: dict[str, tuple[str | None, str | None, object]] = {
    "nproc_per_node": ("4", "nproc_per_node", 4),
    "module": (None, "entry", "module"),
    "no_python": (None, "entry", "program"),
    "run_path": (None, None, "a script is run that way already"),
    "start_method": ("spawn", "start_method", "spawn"),
    "preload": ("a,b", "preload", ("a", "b")),
    "keep_warm": ("10m", "keep_warm_s", 600.0),
    "pass_local_rank": (None, "pass_local_rank", True),
    "use_env": (None, None, "the default"),
    "role": ("trainer", "role", "trainer"),
    "gpus": ("2,4", "gpus", ("2", "4")),
    "gpus_per_proc": ("2", "gpus_per_proc", 2),
    "virtual_local_rank": (None, "virtual_local_rank", True),
    "numa_binding": ("socket", "numa_binding", "socket"),
    "max_restarts": ("3", "max_restarts", 3),
    "shutdown_timeout": ("5", "shutdown_timeout_s", 5.0),
    "health": ("warn", "health", "warn"),
    "hang_timeout": ("600", "hang_timeout_s", 600.0),
    "busy_timeout": ("10m", "busy_timeout_s", 600.0),
    "hang_report": ("off", "hang_report_s", None),
    "signals_to_handle": ("SIGUSR1", "signals", ("SIGUSR1",)),
    "on_exit": ("date", "on_exit", "date"),
    "monitor_interval": ("5", None, "nothing polls"),
    "log_dir": ("logs", "log_dir", "logs"),
    "keep_runs": ("7", "keep_runs", 7),
    "collect_logs": (None, "collect_logs", True),
    "no_samples": (None, "samples", False),
    "no_page": (None, "page", False),
    "debug_on_error": (None, "debug_on_error", True),
    "debug_ranks": ("0,2", "debug_ranks", frozenset({0, 2})),
    "metrics_file": ("m.prom", "metrics_file", "m.prom"),
    "timestamps": (None, "line_prefix", "${time} [${host}:${rank}] "),
    "redirects": ("1", "redirects", Streams(default=1)),
    "tee": ("0:2", "tee", Streams(by_local_rank=((0, 2),))),
    "ranks_filter": ("1,2", "show_ranks", frozenset({1, 2})),
    "local_ranks_filter": ("0", "show_local_ranks", frozenset({0})),
    "duplicate_stdout_filters": ("a,b", "duplicate_stdout_filters", ("a", "b")),
    "duplicate_stderr_filters": ("a,,b", "duplicate_stderr_filters", ("a,b",)),
    "event_log_handler": ("console", "events", "console"),
    "verbose": (None, "verbosity", 1),
    "quiet": (None, "verbosity", -1),
    "nnodes": ("1:1", None, "more need a place to meet: tests/unit/test_options.py"),
    "standalone": (None, None, "one node is the default"),
    "rdzv_id": ("job1", "run_id", "job1"),
    "rdzv_backend": ("c10d", None, "the same on one node"),
    "rdzv_endpoint": ("node1:29400", "master_port", 29400),
    "rdzv_conf": ("timeout=5", None, "one node does not meet another"),
    "node_rank": ("0", None, "there is one node"),
    "master_addr": ("node1", None, "as with torchrun, only with a port: test_torchruns_static_mode_fixes_the_store"),
    "master_port": ("29500", "master_port", 29500),
    "local_addr": ("10.0.0.1", "local_addr", "10.0.0.1"),
    "hosts": ("node1", "hosts", (Host("node1"),)),
    "chdir": ("/", "chdir", "/"),
    "interface": ("eth0", "interface", "eth0"),
    "dry_run": (None, "dry_run", True),
}
NO_EFFECT = {
    "inject": "needs --dry-run: tests/process/test_inject.py",
    "rehearse_compile": "needs --dry-run: test_an_option_without_effect_is_refused",
    "logs_specs": "refused",
    **dict.fromkeys(("version", "docs", "h"), "ends the program"),
    **dict.fromkeys(("ps", "kill", "all"), "tests/process/test_ps.py"),
    **dict.fromkeys(("nodes", "forget"), "tests/unit/test_node_memory.py"),
    "avoid": "tests/unit/test_host_options.py",
    "stacks": "tests/process/test_stacks.py",
    **dict.fromkeys(("page", "serve"), "tests/unit/test_serve.py"),
    "detach": "tests/process/test_detach.py",
    **dict.fromkeys(("attach", "leave", "wait"), "tests/process/test_attach.py"),
    **dict.fromkeys(("logs", "ranks", "attempt", "follow"), "tests/process/test_logs.py"),
    **dict.fromkeys(("check", "deep"), "tests/process/test_check.py"),
    **dict.fromkeys(("plan", "json"), "tests/unit/test_plan.py"),
    **dict.fromkeys(("cluster", "requeue_on"), "tests/unit/test_cluster_options.py"),
    **dict.fromkeys(
        ("hostfile", "include", "exclude", "export", "env_file", "connect_timeout"), "tests/unit/test_host_options.py"
    ),
    **dict.fromkeys(("remote_python", "remote_setup"), "tests/unit/test_host_options.py"),
    **{
        f"ssh_{name}": "tests/unit/test_host_options.py"
        for name in ("user", "port", "identity", "config", "accept_new")
    },
}
FROM_ELSEWHERE = {
    "compile_on_cpu": "with --dry-run only: test_an_option_without_effect_is_refused",
    "injections": "--inject, tests/process/test_inject.py",
    "script": "SCRIPT",
    "script_args": "ARGS",
    "python": "PYTHON_EXEC",
    "text": "SCRIPT - and functions, tests/process/test_stdin_script.py, tests/unit/test_python_api.py",
    "remote": "-x and --ssh-*, tests/unit/test_host_options.py",
    "line_prefix": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "min_nodes": "--nnodes, tests/unit/test_options.py",
    "max_nodes": "--nnodes, tests/unit/test_options.py",
    "rendezvous": "--nnodes and --rdzv-*, tests/unit/test_options.py",
    "master_addr": "--master-addr, --rdzv-endpoint",
    **dict.fromkeys(("join_timeout_s", "lost_after_s"), "--rdzv-conf, tests/unit/test_host_options.py"),
    **dict.fromkeys(("task", "slurm_job", "notices"), "tests/unit/test_cluster_options.py"),
}


def _spellings(name: str, value: str | None) -> Iterator[list[str]]:
    for spelled in {f"--{name}", f"--{name}".replace("_", "-")}:
        yield from ([[spelled, value], [f"{spelled}={value}"]] if value else [[spelled]])


@pytest.mark.parametrize("name", EFFECTS)
def test_every_option_has_an_effect_or_a_reason(
    name: str, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun: test_run 5, 19."""
    value, field, expected = EFFECTS[name]
    asked = [config_of(*argv) for argv in _spellings(name, value)]
    [option] = [o for o in DECLARED if o.name == name]
    if option.pet_variable:
        monkeypatch.setenv(f"PET_{name.upper()}", value or "1")
        asked.append(config_of())
    default = LaunchConfig(script="x.py")
    for config in asked:
        assert (setting(config, field) == expected) if field else (config == default)
        assert field is None or setting(default, field) != expected


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["-n", "4", "x.py"], "--nproc-per-node"),
        (["-np", "4", "x.py"], "--nproc-per-node"),
        (["--num_gpus", "4", "x.py"], "--nproc-per-node"),
        (["--num-processes=4", "x.py"], "--nproc-per-node"),
        (["--num_machines", "2", "x.py"], "--nnodes"),
        (["-H", "a,b", "x.py"], "--hosts"),
        (["ps"], "--ps"),
        (["kill", "job7"], "--kill"),
        (["check"], "--check"),
        (["help"], "--help"),
    ],
)
def test_words_of_other_launchers_and_commands_get_what_was_meant(argv: list[str], meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        main.command.main(argv, prog_name="ddplaunch", standalone_mode=False)
    assert refused.value.hint == f"Did you mean {meant}?"


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


def test_options_and_fields_agree() -> None:
    """No option is forgotten on its way to the config, and no field is out of the user's reach."""
    assert {option.name for option in DECLARED} == {*EFFECTS, *NO_EFFECT}
    reached = {field for _, field, _ in EFFECTS.values() if field}
    assert {*reached, *FROM_ELSEWHERE, *GROUPS} == {
        *GROUP_OF,
        *(field.name for field in dataclasses.fields(LaunchConfig)),
    }


def test_without_options_all_is_default(config_of: ConfigOf) -> None:
    """torchrun: test_run 4."""
    assert config_of() == LaunchConfig(script="x.py")


def test_the_exit_code_is_launchs(launched: Launched) -> None:
    assert run("x.py") == 7


@pytest.mark.parametrize(
    ("argv", "script", "args"),
    [
        (["x.py", "--nproc-per-node", "4"], "x.py", ["--nproc-per-node", "4"]),
        (["x.py", "--help", "--version", "-v"], "x.py", ["--help", "--version", "-v"]),
        (["x.py", "--", "a", "--", "b"], "x.py", ["a", "--", "b"]),
        (["x.py", "--"], "x.py", []),
        (["x.py", "a", "--", "b"], "x.py", ["a", "--", "b"]),
        (["--", "x.py", "--", "a"], "x.py", ["--", "a"]),
        (["-m", "pkg.train", "--", "--epochs", "3"], "pkg.train", ["--epochs", "3"]),
        (["x.py", "", "  ", "a b", "\n"], "x.py", ["", "  ", "a b", "\n"]),
        (["x.py", "$local_rank", "${rank}", "pa$$word"], "x.py", ["$local_rank", "${rank}", "pa$$word"]),
        (["x.py", "--my_opt=a_b", "--my-opt"], "x.py", ["--my_opt=a_b", "--my-opt"]),
        (["x.py", os.fsdecode(b"\xff\xfe")], "x.py", [os.fsdecode(b"\xff\xfe")]),
        ([os.fsdecode(b"\xff.py")], os.fsdecode(b"\xff.py"), []),
        (["--", "x.py", "a"], "x.py", ["a"]),
        (["--", "-x.py", "-m"], "-x.py", ["-m"]),
        (["--role", "r", "--", "x.py"], "x.py", []),
        (["-m", "-r", "3", "pkg.train", "-m", "-r"], "pkg.train", ["-m", "-r"]),
    ],
)
def test_what_follows_the_script_is_passed_on_but_for_one_separator(
    argv: list[str], script: str, args: list[str], launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_SCRIPT", "no")
    monkeypatch.setenv("PET_SCRIPT_ARGS", "no")
    run(*argv)
    assert (launched[0].script, launched[0].script_args) == (script, tuple(args))


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--redirect=3"], "redirects", Streams(default=3)),
        (["--nproc_per", "4"], "nproc_per_node", 4),
        (["--nproc", "4"], "nproc_per_node", 4),
        (["--max-r", "2"], "max_restarts", 2),
        (["--virt"], "virtual_local_rank", True),
        (["-r3"], "redirects", Streams(default=3)),
        (["-r", "3"], "redirects", Streams(default=3)),
        (["-r=3"], "redirects", Streams(default=3)),
        (["-mr3"], "entry", "module"),
        (["-mvr", "3"], "redirects", Streams(default=3)),
        (["-t", "0:1"], "tee", Streams(by_local_rank=((0, 1),))),
        (["--role=-x"], "role", "-x"),
        (["--role", "a b"], "role", "a b"),
        (["--role="], "role", ""),
        (["--role", "a", "--role", "b"], "role", "b"),
        (["--log-dir", os.fsdecode(b"/nowhere/\xff")], "log_dir", os.fsdecode(b"/nowhere/\xff")),
        (["--log-dir", "/dev/null"], "log_dir", "/dev/null"),
        (["--rdzv-id", "none"], "run_id", None),
        (["--rdzv-id="], "run_id", None),
        (["--standalone", "--nnodes=1:4"], "max_nodes", 1),
        (["--start-method", "fork"], "start_method", "forkserver"),
        (["--event-log-handler", "dynamic_rendezvous"], "events", "null"),
    ],
)
def test_options_are_read_as_argparse_reads_them(
    argv: list[str], field: str, value: object, config_of: ConfigOf
) -> None:
    assert setting(config_of(*argv), field) == value


@pytest.mark.parametrize(
    ("argv", "spelled", "rest"),
    [
        (["--serve"], ["--serve="], []),
        (["--serve=8080"], ["--serve=8080"], []),
        (["--serve", "8080", "x.py"], ["--serve=8080"], ["x.py"]),
        (["--ps", "--hosts", "a"], ["--ps=", "--hosts=a"], []),
        (["--ps", "job7", "--log-dir=d"], ["--ps=job7", "--log-dir=d"], []),
        (["--ps", "--", "x.py"], ["--ps="], ["x.py"]),
    ],
)
def test_an_option_whose_value_may_be_missing(argv: list[str], spelled: list[str], rest: list[str]) -> None:
    assert normalize(main.command.params, argv) == (spelled, rest)


def test_torchruns_own_abbreviation(config_of: ConfigOf) -> None:
    """torchrun: test_run 18."""
    config = config_of("--redirect=3", "--tee=3")
    assert (config.output.redirects, config.output.tee) == (Streams(default=3), Streams(default=3))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["no script"]),
        (["-m"], ["no script"]),
        (["--lo", "x", "x.py"], ["ambiguous", "--local-addr", "--log-dir", "--logs-specs"]),
        (["--nproc-per-nod3", "4", "x.py"], ["no such option: --nproc-per-nod3", "Did you mean --nproc-per-node"]),
        (["--nprocs", "4", "x.py"], ["no such option: --nprocs", "Did you mean --nproc-per-node"]),
        (["--lr", "0.1", "x.py"], ["no such option: --lr", "after the script"]),
        (["-z", "x.py"], ["no such option: -z"]),
        (["-mz", "x.py"], ["no such option: -z"]),
        (["--nnodes"], ["--nnodes needs a value"]),
        (["-r"], ["-r needs a value"]),
        (["--log-dir", "--standalone", "x.py"], ["--log-dir needs a value", "--log-dir=--standalone"]),
        (["--role", "--", "x.py"], ["--role needs a value"]),
        (["--standalone=1", "x.py"], ["--standalone takes no value"]),
        (["--start-method", "bogus", "x.py"], ["--start-method", "forkserver"]),
        (["--numa-binding", "bogus", "x.py"], ["--numa-binding", "core-complex"]),
        (["--log-dir", __file__, "x.py"], ["--log-dir", "is a file"]),
        (["--nproc-per-node", "-1", "x.py"], ["--nproc-per-node -1"]),
        (
            ["--nnodes", "2", "x.py"],
            ["--nnodes 2", "neither hosts nor a rendezvous endpoint is given", "--rdzv-endpoint"],
        ),
        (["--nnodes", "2", "--standalone", "x.py"], ["--standalone", "--nnodes is 2"]),
        (["--node-rank", "-1", "x.py"], ["--node-rank -1"]),
        (["--rdzv-backend", "etcd", "x.py"], ["etcd", "c10d", "nothing needs to be installed"]),
        (["--rdzv-backend", "etcd-v2", "x.py"], ["etcd-v2", "c10d"]),
        (["--rdzv-backend", "mine", "x.py"], ["mine", "static or c10d"]),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "a:b", "x.py"], ["--rdzv-endpoint a:b", "port"]),
        (["--rdzv-endpoint", "node1", "x.py"], ["--rdzv-endpoint node1", "needs a port"]),
        (["--rdzv-conf", "join_timeout", "x.py"], ["--rdzv-conf join_timeout", "list like"]),
        (["--rdzv-conf", "join_timeout=-1", "x.py"], ["join_timeout=-1", "above 0"]),
        (["--rdzv-conf", "is_host=maybe", "x.py"], ["is_host=maybe", "true or false"]),
        (["--rdzv-conf", "store_type=file", "x.py"], ["store_type=file", "--rdzv-endpoint HOST:PORT"]),
        (["--rdzv-id", "a/b", "x.py"], ["--rdzv-id"]),
        (["--master-port", "x", "x.py"], ["--master-port x"]),
        (["--master-addr", "a b", "--master-port", "1", "x.py"], ["--master-addr a b"]),
        (["--local-addr", "a b", "x.py"], ["--local-addr a b"]),
        (["--monitor-interval", "0", "x.py"], ["--monitor-interval 0"]),
        (["--max-restarts", "-1", "x.py"], ["--max-restarts -1"]),
        (["--shutdown-timeout", "-1", "x.py"], ["--shutdown-timeout -1"]),
        (["--event-log-handler", "nope", "x.py"], ["--event-log-handler nope", "console"]),
        (["-v", "-q", "x.py"], ["--verbose and --quiet"]),
        (["--local-ranks-filter", "a", "x.py"], ["--local-ranks-filter a"]),
        (["-t", "4", "x.py"], ["--tee 4"]),
        (["--all", "x.py"], ["--all: needs --ps"]),
        (["--kill", "job7", "--all"], ["--all: needs --ps"]),
        (["--ps", "--all", "--kill", "job7"], ["--ps --all cannot be combined with --kill"]),
        (["--ps", "--all", "--check"], ["--ps --all cannot be combined with --check"]),
        (["--ps", "--all", "x.py"], ["--ps --all: x.py: no script is run"]),
        (["--ps", "job7", "--all"], ["--ps cannot be combined with --all"]),
        (["--ps", "job7", "x.py"], ["--ps: x.py: no script is run"]),
        (["--ps", "--all", "--hosts", "gpu1"], ["--ps --all reads files of this machine, and --hosts names others"]),
        (["--ps", "--all", "--ssh-port", "22"], ["--ssh-*", "only with --hosts"]),
        (["--nodes", "2", "x.py"], ["--nodes: needs --ps", "--nnodes"]),
        (["--ps", "--nodes", "--all"], ["--ps --all cannot be combined with --nodes"]),
        (
            ["--ps", "--nodes", "--hosts", "gpu1"],
            ["--ps --nodes reads files of this machine"],
        ),
        (["--ps", "--nodes", "--plan"], ["--ps --nodes cannot be combined with --plan"]),
        (["--forget", "gpu1", "--ps"], ["--forget cannot be combined with --ps"]),
        (["--forget", "gpu1", "x.py"], ["--forget: x.py: no script is run"]),
        (["--json", "x.py"], ["--json: needs --plan"]),
        (["--ps", "--json"], ["--json: needs --plan"]),
        (["--page", "x", "train.py"], ["--page: train.py: no script is run"]),
        (["--page", "x", "--ps"], ["--page cannot be combined with --ps"]),
        (["--serve", "--page", "x"], ["--serve cannot be combined with --page"]),
        (["--serve", "--", "train.py"], ["--serve: train.py: no script is run"]),
        (["--serve=train.py"], ["--serve train.py: not a port"]),
        (["--serve=70000"], ["--serve 70000: not a port"]),
        (["--serve=0"], ["--serve 0: not a port"]),
        (["--logs", "x", "--ranks", "a"], ["--ranks a: must be ranks"]),
        (["--attach", "x", "--ranks", "1"], ["--ranks: needs --logs"]),
        (["--forget", "gpu[1-"], ["--forget gpu[1-"]),
        (["--forget", ""], ["--forget: names no host"]),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_a_hint(argv: list[str], words: list[str], error_of: ErrorOf) -> None:
    """torchrun: rendezvous 2, 7, 8, 9."""
    text = error_of(*argv)
    assert all(word in text for word in words)


@pytest.mark.parametrize("name", [name for name, (value, _, _) in EFFECTS.items() if value and name != "role"])
def test_an_empty_value_is_an_error_or_none_at_all(
    name: str, capsys: pytest.CaptureFixture[str], launched: Launched
) -> None:
    """As from ``--master-port=$PORT`` in a shell where PORT is not set."""
    spelled = "--" + name.replace("_", "-")
    if run(f"{spelled}=", "x.py") == 2:
        assert f"ddplaunch: error: {spelled}" in capsys.readouterr().err
    else:
        assert launched.pop() == LaunchConfig(script="x.py")


def test_logs_specs_plug_ins_are_refused(error_of: ErrorOf) -> None:
    """torchrun: test_run 16."""
    assert "--ranks-filter" in error_of("--logs-specs", "mine", "x.py")


def test_torchruns_own_logs_specs_are_accepted(config_of: ConfigOf) -> None:
    assert config_of("--logs-specs=default", "x.py") == config_of("x.py")


def test_a_program_is_not_a_module(error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun: test_run 3."""
    assert "exclude each other" in error_of("--no-python", "-m", "x")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    assert "PET_NO_PYTHON" in error_of("-m", "x")


@pytest.mark.parametrize(
    ("argv", "entry"),
    [
        ([], "script"),
        (["-m"], "module"),
        (["--no-python"], "program"),
        (["--run-path"], "script"),
        (["--run-path", "--no-python"], "script"),
        (["--run-path", "--no-python", "-m"], "script"),
    ],
)
def test_entry(argv: list[str], entry: str, config_of: ConfigOf) -> None:
    """torchrun: test_run 3, 12."""
    assert config_of(*argv).entry == entry


@pytest.mark.parametrize("word", ["auto", "cpu", "gpu", "xpu"])
def test_nproc_per_node(word: str, config_of: ConfigOf, error_of: ErrorOf) -> None:
    """torchrun: test_run 6."""
    assert config_of("--nproc-per-node", word).workers.nproc_per_node == word
    assert "auto, cpu, gpu, xpu" in error_of("--nproc-per-node", f"{word}s", "x.py")


@pytest.mark.parametrize(
    ("argv", "store"),
    [
        ("--master-port 29501", ("127.0.0.1", 29501)),
        ("--master-addr node1 --master-port 29501 --node-rank 0", ("node1", 29501)),
        ("--master-addr [::1] --master-port 29501", ("::1", 29501)),
        ("--master-addr node1", (None, None)),
        ("--rdzv-endpoint node1:29502", ("node1", 29502)),
        ("--rdzv-endpoint node1:29502 --master-port 29501", ("node1", 29502)),
        ("--rdzv-backend c10d --master-port 29501", (None, None)),
        ("--rdzv-backend c10d --rdzv-endpoint node1", (None, None)),
        ("--standalone --master-port 29501", (None, None)),
    ],
)
def test_torchruns_static_mode_fixes_the_store(
    argv: str, store: tuple[str | None, int | None], config_of: ConfigOf
) -> None:
    """torchrun: test_run 2."""
    config = config_of(*argv.split())
    assert (config.master_addr, config.master_port) == store


def test_standalone_is_one_node_and_ignores_the_meeting_place(config_of: ConfigOf) -> None:
    """torchrun: test_run 11."""
    meeting = ["--rdzv-backend", "etcd", "--rdzv-endpoint", "a:b", "--rdzv-conf", "x", "--node-rank", "3"]
    assert config_of("--standalone", *meeting) == LaunchConfig(script="x.py")


def test_old_launch_scripts_get_their_argument(config_of: ConfigOf) -> None:
    """torchrun: launch_test 1, 2."""
    assert config_of("--pass-local-rank").workers.pass_local_rank
    assert not config_of("--use_env").workers.pass_local_rank


def test_the_command_line_beats_the_environment_and_that_the_default(
    config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun: argparse_util_test 1."""
    assert config_of().workers.role == "default"
    monkeypatch.setenv("PET_ROLE", "from_env")
    assert config_of().workers.role == "from_env"
    assert config_of("--role", "given").workers.role == "given"
    monkeypatch.setenv("PET_ROLE", "")
    assert config_of().workers.role == "default"


def test_the_environments_name_is_the_long_one(config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun: argparse_util_test 1."""
    monkeypatch.setenv("PET_R", "3")
    assert config_of().output.redirects == Streams()
    monkeypatch.setenv("PET_REDIRECTS", "2")
    assert config_of().output.redirects == Streams(default=2)
    assert config_of("-r", "1").output.redirects == Streams(default=1)


@pytest.mark.parametrize(
    ("text", "on"),
    [("1", True), ("true", True), ("YES", True), ("0", False), ("false", False), ("no", False), ("", False)],
)
def test_flags_in_the_environment(text: str, on: bool, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun: test_run 5; argparse_util_test 2."""
    monkeypatch.setenv("PET_MODULE", text)
    assert config_of().entry == ("module" if on else "script")
    assert config_of("-m").entry == "module"


@pytest.mark.parametrize(
    ("name", "value", "argv"),
    [
        ("PET_MODULE", "maybe", []),
        ("PET_START_METHOD", "bogus", []),
        ("PET_NNODES", "x", []),
        ("PET_NNODES", "2", ["--standalone"]),
        ("PET_MAX_RESTARTS", "x", []),
        ("PET_RDZV_ENDPOINT", "a:b", []),
    ],
)
def test_an_error_names_the_variable_it_comes_from(
    name: str, value: str, argv: list[str], error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    text = error_of(*argv, "x.py")
    assert f"Set in the environment: {name}." in text or f"error: {name}={value}" in text


def test_an_error_of_the_command_line_does_not_name_the_environment(
    error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_START_METHOD", "spawn")
    monkeypatch.setenv("PET_TEE", "3")
    assert "PET" not in error_of("--start-method", "bogus", "x.py")
    assert "PET" not in error_of("-t", "bogus", "x.py")


@pytest.mark.parametrize(
    ("argv", "env", "seconds"),
    [([], None, 30.0), ([], "", 30.0), ([], "5", 5.0), (["--shutdown-timeout", "7"], "5", 7.0), ([], "0", 0.0)],
)
def test_the_shutdown_timeout_is_the_options_then_the_environments_then_30(
    argv: list[str], env: str | None, seconds: float, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun: shutdown_timeout_test 1."""
    if env is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", env)
    assert config_of(*argv).timeouts.shutdown_timeout_s == seconds


def test_a_wrong_shutdown_timeout_in_the_environment_is_named(
    error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT soon" in error_of("x.py")


def test_torchruns_environment(config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun: test_run 18."""
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    config = config_of()
    assert (config.python, config.output.line_prefix) == ("/opt/python", "[rank${rank}]: ")


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
    assert re.fullmatch(r"ddplaunch \S+ \(torch \S+, Python 3\.\d+\.\d+\)\n", capsys.readouterr().out)


def test_an_error_of_ours_is_told_with_its_exit_code(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(_config: LaunchConfig, **_: object) -> None:
        raise LaunchError("no node", "Plug it in.", 82)

    _launch_is(monkeypatch, launch)
    assert run("x.py") == 82
    assert capsys.readouterr().err == "ddplaunch: error: no node\n  hint: Plug it in.\n"


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


def test_help_into_a_closed_pipe_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", _Unread())
    run("--help")
    assert not capsys.readouterr().err


def test_the_exit_code_survives_a_stderr_that_nobody_reads(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Unread())
    assert run("--bogus") == 2


@pytest.mark.parametrize(
    ("args", "incomplete", "expected"),
    [
        ([], "--nproc", {"--nproc-per-node"}),
        ([], "-", {option.opts[-1] for option in DECLARED if not option.hidden} | {"--help"}),
        ([], "tr", {"file"}),
        (["--nproc-per-node", "4"], "", {"file"}),
        (["--nproc_per_node", "4", "x.py"], "da", {"file"}),
        (["x.py"], "--nproc", {"file"}),
        (["--start-method"], "", {"forkserver", "spawn", "fork"}),
        (["--log-dir"], "", {"dir"}),
        (["--chdir"], "", {"dir"}),
        (["--hostfile"], "ho", {"file"}),
        (["--nproc-per-node"], "", {"gpu", "cpu", "auto"}),
        (["--rdzv-backend"], "c", {"c10d"}),
        (["--cluster"], "", {"auto", "none", *(row.word for row in schedulers.TABLE)}),
        (["--cluster"], "sl", {"slurm"}),
    ],
)
def test_shells_complete_options_values_and_files(args: list[str], incomplete: str, expected: set[str]) -> None:
    found = BashComplete(main.command, {}, "ddplaunch", "_DDPLAUNCH_COMPLETE").get_completions(args, incomplete)
    assert {item.value if item.type == "plain" else item.type for item in found} >= expected
    assert ("file" in expected) == any(item.type == "file" for item in found)


def completed(args: list[str], incomplete: str = "") -> list[str]:
    shell = BashComplete(main.command, {}, "ddplaunch", "_DDPLAUNCH_COMPLETE")
    return [item.value for item in shell.get_completions(args, incomplete)]


def test_words_of_an_option_begin_with_what_was_typed() -> None:
    assert completed(["--cluster"], "p") == ["pals", "pbs"]
    assert completed(["--hosts"]) == []
    assert completed(["--hang-report"]) == ["off"]


def test_what_completes_an_option_exists() -> None:
    named = {option.row.completes for option in DECLARED if isinstance(option.row.completes, str)}
    assert len(named) > 4
    assert all(load(name).__module__ == completion.__name__ for name in named)


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
    """Where each node has its own launcher, its run tag contains the id that this launcher had made."""
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


def test_the_command_line_imports_little() -> None:
    # click itself may need more: in Python 3.10 its uuid brings subprocess.
    code = "import click, sys; before = {*sys.modules}; import ddplaunch.cli.main; print(*sys.modules.keys() - before)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "ddplaunch.cli.options" in loaded
    heavy = {"torch", "numpy", "psutil", "paramiko", "asyncio", "subprocess", "json", "logging", "importlib.metadata"}
    assert not loaded & (heavy | {"ddplaunch.launcher", "ddplaunch.protocol.results"})
