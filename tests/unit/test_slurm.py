"""A step, an allocation and neither are told apart by SLURM's variables, and its lists are read as it writes them."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplaunch.cluster.hostlist import fold
from ddplaunch.cluster.slurm import lint, parse_counts, parse_node_list, read_allocation, read_step
from ddplaunch.errors import UsageError
from tests.support import golden

JOB = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "gpu[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_NODELIST": "gpu[1-4]",
    "SLURM_TASKS_PER_NODE": "8(x4)",
}

BATCH = {**JOB, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "gpu1"}
"""What a batch script has, and it looks like rank 0 of 4 nodes."""

STEP = {
    **JOB,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[2-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "gpu3",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_STEP_LAUNCHER_PORT": "40001",
}
"""One task on each of three of the job's four nodes; this is the second."""


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# The step.


def test_a_task_knows_its_step_and_not_its_job():
    step = read_step({**STEP, "SLURM_RESTART_COUNT": "3"})
    assert step is not None
    assert (step.job_id, step.step_id, step.requeue_count) == ("1234", "2", 3)
    assert step.hosts == ("gpu2", "gpu3", "gpu4")
    assert (step.node_id, step.rank, step.local_rank, step.tasks_per_node) == (1, 1, 0, (1, 1, 1))
    assert step.reserved_ports == ()
    assert not [*lint(STEP, step)]


def test_restarts_are_none_where_slurm_does_not_count_them():
    step = read_step(STEP)
    assert step is not None
    assert step.requeue_count == 0


@pytest.mark.parametrize(
    "environ",
    [
        {},
        JOB,
        BATCH,
        # Since 26.05 the batch script has a step id.
        {**BATCH, "SLURM_STEP_ID": "-5"},
        # salloc's shell on a compute node, with LaunchParameters=use_interactive_step.
        {**STEP, "SLURM_STEP_ID": "4294967290"},
        {**STEP, "SLURM_STEP_ID": "-6"},
        # sbatch called in a step of another job, on another node.
        {**BATCH, **{k: v for k, v in STEP.items() if "STEP" in k}, "SLURM_STEP_NODELIST": "login[7-9]"},
    ],
)
def test_outside_of_a_step_there_is_none(environ: dict[str, str]):
    assert read_step(environ) is None


WORKERS = {**STEP, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_PROCID": "2"}
"""Two tasks on each node; this is the first of the second node."""

ONE_NODE = {**STEP, "SLURM_STEP_NODELIST": "gpu3", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
PLAIN = {**ONE_NODE, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
TASKS = {**ONE_NODE, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (STEP, ("SLURM_JOB_ID",)),
        (STEP, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")),
        (WORKERS, ("SLURM_STEP_TASKS_PER_NODE",)),
        (WORKERS, ("SLURM_PROCID",)),
        (WORKERS, ("SLURM_LOCALID",)),
        (TASKS, ("SLURM_PROCID", "SLURM_LOCALID")),
    ],
)
def test_a_variable_that_is_lost_and_needed_is_named(environ: dict[str, str], names: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"({'|'.join(names)}) is not"):
        read_step(without(environ, *names))


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (STEP, ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_NODEID")),
        (STEP, ("SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_PROCID")),
        (STEP, ("SLURM_NODEID", "SLURMD_NODENAME")),
        (WORKERS, ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NODEID")),
        (TASKS, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_NODEID")),
        (PLAIN, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID")),
        (PLAIN, ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID", "SLURMD_NODENAME")),
    ],
)
def test_lost_variables_that_follow_from_the_others_are_not_needed(environ: dict[str, str], names: tuple[str, ...]):
    assert read_step(without(environ, *names)) == read_step(environ)
    assert read_step(environ | dict.fromkeys(names, "")) == read_step(environ)


def test_one_task_needs_no_job_id():
    step = read_step(without(PLAIN, "SLURM_JOB_ID"))
    assert step is not None
    assert (step.job_id, step.tasks_per_node) == ("unknown", (1,))


def error_without(environ: dict[str, str], lost: tuple[str, ...]) -> str:
    try:
        found = read_step(without(environ, *lost))
    except UsageError as error:
        return error.message
    return "" if found == read_step(environ) else f"another step: {found}"


@pytest.mark.parametrize("environ", [STEP, WORKERS, PLAIN, TASKS])
def test_whatever_is_lost_the_step_is_the_same_or_the_missing_variable_is_named(environ: dict[str, str]):
    names = [name for name in environ if "STEP_NUM" in name or "TASKS_PER" in name or name.endswith("ID")]
    names = [*sorted({*names, "SLURMD_NODENAME"} - {"SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_TASKS_PER_NODE"})]
    for size in range(1, len(names) + 1):
        for lost in itertools.combinations(names, size):
            if {"SLURM_PROCID", "SLURMD_NODENAME"} <= set(lost):
                continue
            error = error_without(environ, lost)
            assert not error or any(f"{name} is not" in error for name in lost), (lost, error)


def test_a_step_that_has_lost_its_nodes_does_not_start_those_of_the_job():
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST is not"):
        read_allocation(without(STEP, "SLURM_STEP_NODELIST"))
    one_node = {**without(PLAIN, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST": "gpu3"}
    assert read_allocation(one_node) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_STEP_NUM_NODES": "4"},
        {"SLURM_STEP_NUM_TASKS": "24"},
        {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        {"SLURM_STEP_NODELIST": "gpu[3-4]"},
        {"SLURM_NODEID": "3"},
        {"SLURM_PROCID": "3"},
        {"SLURM_LOCALID": "1"},
    ],
)
def test_variables_that_contradict_each_other_are_refused(wrong: dict[str, str]):
    with pytest.raises(UsageError, match="contradict") as caught:
        read_step({**STEP, **wrong})
    assert "--cluster none" in caught.value.hint


def test_a_number_that_is_none_is_refused():
    with pytest.raises(UsageError, match="SLURM_NODEID=x: must be a whole number"):
        read_step({**STEP, "SLURM_NODEID": "x"})


def test_reserved_ports_are_those_of_the_step():
    step = read_step({**STEP, "SLURM_STEP_RESV_PORTS": "12000-12002,12007"})
    assert step is not None
    assert step.reserved_ports == (12000, 12001, 12002, 12007)
    with pytest.raises(UsageError, match="SLURM_STEP_RESV_PORTS"):
        read_step({**STEP, "SLURM_STEP_RESV_PORTS": "some"})


# The allocation.


def test_a_batch_script_and_a_shell_know_their_job():
    for environ in (JOB, BATCH):
        job = read_allocation(environ)
        assert job is not None
        assert (job.job_id, job.hosts) == ("1234", ("gpu1", "gpu2", "gpu3", "gpu4"))
    assert read_allocation({}) is None
    assert read_allocation({"SLURM_JOB_ID": "1234"}) is None


# Traps.


def test_a_binding_left_over_from_the_step_in_which_sbatch_was_called_is_noticed():
    assert "--cpu-bind" in " ".join(lint({**BATCH, "SLURM_CPU_BIND": "quiet,mask_cpu:0x0000000F"}, None))
    assert not [*lint({**BATCH, "SLURM_CPU_BIND": "quiet,cores"}, None)]
    # In a step it is that step's own.
    assert not [*lint({**STEP, "SLURM_CPU_BIND": "quiet,mask_cpu:0x0000000F"}, read_step(STEP))]


def test_one_component_of_a_heterogeneous_job_is_noticed():
    assert "--het-group" in " ".join(lint({**BATCH, "SLURM_HET_SIZE": "2"}, None))


def test_a_step_of_one_job_in_the_variables_of_another_is_noticed():
    environ = {**STEP, "SLURM_JOB_NODELIST": "gpu[3-9]"}
    assert "belongs to another job" in " ".join(lint(environ, read_step(environ)))


def test_ranks_that_alternate_between_nodes_are_noticed():
    tasks = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    block, cyclic = {**STEP, **tasks, "SLURM_PROCID": "2"}, {**STEP, **tasks, "SLURM_PROCID": "1"}
    assert not [*lint(block, read_step(block))]
    assert "--distribution=block" in " ".join(lint(cyclic, read_step(cyclic)))
    # -m arbitrary, one task per node.
    assert not [*lint({}, read_step({**STEP, "SLURM_PROCID": "0"}))]


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


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5))
def test_ranges_are_padded_as_their_first_number(ranges: list[tuple[int, int, int]]):
    inside, names = [], []
    for first, more, width in ranges:
        low, high = f"{first:0{width}}", f"{first + more:0{width}}"
        # SLURM pads both ends alike.
        inside.append(f"{low}-{high}" if more else low)
        names += [f"n{number:0{width}}" for number in range(first, first + more + 1)]
    assert list(parse_node_list(f"n[{','.join(inside)}]")) == names


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
