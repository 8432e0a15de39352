"""A step, an allocation and neither are told apart by SLURM's variables, and its lists are read as it writes them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplaunch.cluster.hosts import Host, fold
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import UsageError
from ddplaunch.features.remote import call_back
from ddplaunch.features.slurm import scontrol, srun
from ddplaunch.features.slurm.reader import lint, parse_counts, parse_node_list, read_allocation, read_step
from tests.support import golden

FILE = Path(__file__).parent / "data" / "slurm_environments.txt"


def known() -> Iterator[tuple[str, dict[str, str]]]:
    """Environments as SLURM sets them, by name."""
    for part in FILE.read_text().split("##### ")[1:]:
        title, *lines = part.strip().splitlines()
        yield title.partition(":")[0], dict(line.split("=", 1) for line in lines)


KNOWN = dict(known())


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def environment(question: str) -> dict[str, str]:
    """``step NODEID=3 -LOCALID``: those of a step, with another value, and without one; ``SLURM_`` is left out."""
    name, *changes = question.split()
    lost = [f"SLURM_{change[1:]}" for change in changes if change.startswith("-")]
    given = [change.split("=", 1) for change in changes if not change.startswith("-")]
    return without({**KNOWN[name], **{f"SLURM_{name}": value for name, value in given}}, *lost)


def test_a_task_knows_its_step_and_not_its_job():
    golden.check_answers("slurm_steps", lambda question: read_step(environment(question)))


def test_outside_of_a_step_there_is_a_job():
    golden.check_answers("slurm_jobs", lambda question: read_allocation(environment(question)))


def test_traps_are_noticed():
    def noticed(question: str) -> str:
        environ = environment(question)
        return "; ".join(lint(environ, read_step(environ)))

    golden.check_answers("slurm_traps", noticed)


def error_without(environ: dict[str, str], lost: tuple[str, ...]) -> str:
    try:
        found = read_step(without(environ, *lost))
    except UsageError as error:
        return error.message
    return "" if found == read_step(environ) else f"another step: {found}"


@pytest.mark.parametrize("name", ["step", "workers", "plain", "tasks"])
def test_whatever_is_lost_the_step_is_the_same_or_the_missing_variable_is_named(name: str):
    environ = KNOWN[name]
    names = [name for name in environ if "STEP_NUM" in name or "TASKS_PER" in name or name.endswith("ID")]
    names = [*sorted({*names, "SLURMD_NODENAME"} - {"SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_TASKS_PER_NODE"})]
    for size in range(1, len(names) + 1):
        for lost in itertools.combinations(names, size):
            if {"SLURM_PROCID", "SLURMD_NODENAME"} <= set(lost):
                continue
            error = error_without(environ, lost)
            assert not error or any(f"{name} is not" in error for name in lost), (lost, error)


# Node lists.


def test_a_node_list_is_read_in_its_order_or_refused():
    golden.check_answers("slurm_node_lists", lambda text: " ".join(parse_node_list(text, "SLURM_JOB_NODELIST")))


NAMES = st.sets(
    st.builds(
        lambda stem, number, width, end: f"{stem}{number:0{width}}{end}",
        st.sampled_from(["n", "gpu-", "a1b", "rack2-node"]),
        st.integers(0, 120),
        st.integers(1, 4),
        st.sampled_from(["", "-ib", ".example"]),
    ),
    min_size=1,
    max_size=30,
)


@given(NAMES)
def test_every_folded_list_of_names_reads_back(names: set[str]):
    assert set(parse_node_list(fold(names))) == names
    assert list(parse_node_list(",".join(sorted(names)))) == sorted(names)


@example("n[1-3],[")
@given(st.text(st.sampled_from("n0139[]-,.x "), max_size=20))
def test_any_text_is_names_or_a_usage_error(text: str):
    with contextlib.suppress(UsageError):
        names = parse_node_list(text)
        assert names
        assert all(name and not set(name) & set("[], ") for name in names)


# Counts.


def test_counts_are_one_per_node_or_refused():
    golden.check_answers("slurm_counts", lambda text: parse_counts(text, "SLURM_STEP_TASKS_PER_NODE"))


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(1, 9)), min_size=1, max_size=9))
def test_counts_read_back(runs: list[tuple[int, int]]):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert parse_counts(text) == tuple(count for count, times in runs for _ in range(times))


# Steps for agents.


def test_a_step_of_ours_inherits_nothing_of_how_the_job_counts_tasks():
    inherited = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2", "SLURM_CPU_BIND": "x", "SLURM_NTASKS": "9", "A": "b"}
    assert srun.environ_of_srun(inherited) == {"SLURM_JOB_ID": "7", "A": "b"}


def test_a_job_with_a_number_of_gpus_gives_each_step_those_of_its_nodes():
    """A question is the variables of a job."""
    golden.check_answers(
        "gpus_of_steps", lambda question: srun._gpus(dict(word.split("=") for word in question.split()))
    )


def test_agents_use_an_address_that_the_user_has_chosen_if_it_is_the_launchers():
    def chosen(question: str) -> str:
        return call_back.chosen_address(
            LaunchConfig(script="x.py", hosts=(Host("node7"),), **golden.keywords(question))
        )

    golden.check_answers("chosen_addresses", chosen)


@pytest.mark.parametrize(
    ("told", "ports"),
    [
        ((0, "SrunEpilog = (null)\nSrunPortRange           = 60001-60003\nSrunProlog = x"), [60001, 60002, 60003]),
        ((0, "SrunPortRange           = 0-0\n"), []),
        ((0, "SrunPortRange           = (null)\n"), []),
        ((1, "scontrol did not answer"), []),
    ],
)
def test_a_login_node_listens_at_ports_that_are_open_for_srun(
    told: tuple[int, str], ports: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scontrol, "run", lambda *_: told)
    assert list(srun._ports()) == ports
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert list(srun._ports()) == []
