"""What the rows of options say of fields is done; where several nodes meet: torchrun's options for it."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

import pytest

import ddplaunch
from ddplaunch import features
from ddplaunch.cli import build_config, main, options, rendezvous_options
from ddplaunch.cli.options import ROWS
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import NO_LOGS, LaunchConfig, RemoteConfig
from ddplaunch.errors import UsageError
from ddplaunch.rows import DRY_RUN, Option, flag
from tests.support import command_lines, golden
from tests.support.configs import launch_config


def config(*argv: str) -> LaunchConfig:
    return main.command.main([*argv, "x.py"], prog_name="ddplaunch", standalone_mode=False)


@pytest.mark.features
def test_where_several_nodes_meet():
    """torchrun: rendezvous 1, 5, 6, 8."""
    golden.check_answers("meeting_places", command_lines.told)


C10D = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1")


def test_the_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DDPLAUNCH_SECRET", "sixteen letters!")
    assert "sixteen" not in repr(config(*C10D))


def test_every_key_of_torchruns_backends_counts_or_is_named_with_the_reason():
    keys = (*rendezvous_options.EFFECTIVE, *rendezvous_options.IGNORED)
    fit = {"store_type": "tcp", "is_host": "true"}
    [notice] = config(*C10D, "--rdzv-conf", ",".join(f"{key}={fit.get(key, 5)}" for key in keys)).notices
    assert (notice.kind, notice.min_verbosity) == ("warning", 0)
    named = notice.text.split(": without effect: ")[1]
    assert set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", named))) == set(rendezvous_options.IGNORED)
    assert "close_timeout (ddplaunch ends all nodes without a timeout)" in named


# Fields that the row of an option sets.


HOSTS = (Host("a"), Host("b"))


@pytest.mark.parametrize("row", [row for row in ROWS if row.sets], ids=lambda row: row.name)
def test_a_row_names_a_field(row: Option) -> None:
    attrgetter(row.sets)(LaunchConfig(script="x.py"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"after": "--time-stamps"}, "there is no heading '', and no option '--time-stamps'"),
        ({"heading": "Outputs"}, "there is no heading 'Outputs', and no option ''"),
        ({}, "there is no heading '', and no option ''"),
    ],
)
def test_an_option_that_has_no_place_on_the_help_page_is_told(
    place: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "rows", lambda: (flag("--new", "", **place),))
    with pytest.raises(ValueError, match=f"--new: {message}"):
        options._with_features({"Output and logs": [flag("--timestamps", "")]})


def test_a_feature_names_settings() -> None:
    for feature in features.FEATURES:
        for setting in filter(None, (*feature.early_if, feature.watch_if)):
            attrgetter(setting)(LaunchConfig(script="x.py"))


def test_what_has_a_condition_has_a_field() -> None:
    assert all(row.sets for row in ROWS if row.only)


ADDED = [
    Option(
        "--patience", "TIME", "", sets="timeouts.hang_timeout_s", parse=lambda text, _: float(text), only=(DRY_RUN,)
    ),
    Option("--folder", "DIR", "", sets="output.log_dir", variable="FOLDER"),
    Option("--word", "A", "", sets="injections", multiple=True, parse=lambda text, _: text.upper()),
    flag("--without-page", "", sets="output.page", gives=False),
]


def read(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], **given: object) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(build_config, "ROWS", ADDED)
    return build_config.read({"patience": None, "folder": None, "word": (), "without_page": False, **given}, environ)


def test_a_row_is_enough_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, {}, patience="3", folder="f", word=("a", "b"), without_page=True)
    assert found["timeouts"] == {"hang_timeout_s": 3.0}
    assert found["output"] == {"log_dir": "f", "page": False}
    assert found[""] == {"injections": ("A", "B")}
    with pytest.raises(UsageError, match="--patience has an effect only with --dry-run"):
        build_config.checked(launch_config(script="x.py", hang_timeout_s=3.0))


def test_what_is_not_given_keeps_the_default_of_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(read(monkeypatch, {"FOLDER": ""}, folder="").values())


def test_a_variable_stands_for_an_option_that_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, {"FOLDER": "e"})["output"] == {"log_dir": "e"}
    assert read(monkeypatch, {"FOLDER": "e"}, folder="f")["output"] == {"log_dir": "f"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            {"compile_on_cpu": True},
            "--rehearse-compile has an effect only with --dry-run",
            marks=pytest.mark.features,
        ),
        ({"duplicate_stdout_filters": ("x",), "log_dir": NO_LOGS}, "only with log files"),
        pytest.param(
            {"hosts": HOSTS, "remote": RemoteConfig(transport="srun", port=2222)},
            "--ssh-port has an effect only over SSH, with --hosts or --hostfile",
            marks=pytest.mark.features,
        ),
    ],
)
def test_an_option_without_effect_is_refused(settings: dict[str, Any], words: str) -> None:
    config = launch_config(script="x.py", **settings)
    with pytest.raises(UsageError, match=words):
        build_config.checked(config)
    with pytest.raises(UsageError, match=words):
        ddplaunch.launch(config)


@pytest.mark.features
@pytest.mark.parametrize("name", ["local", "teleport"])
def test_hosts_are_reached_by_a_transport_to_hosts(name: str) -> None:
    config = launch_config(script="x.py", hosts=HOSTS, remote=RemoteConfig(transport=name))
    with pytest.raises(UsageError, match=f"--transport {name}: must be ssh"):
        ddplaunch.launch(config)


def test_a_row_with_conditions_that_sets_no_field_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="--lr: an option with `only` needs `sets`"):
        flag("--lr", "Learn.", only=(DRY_RUN,))


def test_a_row_that_sets_a_field_of_another_group_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"--lr: no option sets rendezvous\.port"):
        flag("--lr", "Learn.", sets="rendezvous.port")
