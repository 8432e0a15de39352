"""What is read from the answers of NCCL's RAS; and that no answer is an error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.system.gpus.ras_report import Communicator, RasRank, RasReport, report
from tests.support.fake_ras import BAD_TEXT, HEALTHY_TEXT, as_json, missing, rank


def test_json_has_every_rank() -> None:
    ranks = [rank(0, AllReduce=2892), rank(1, AllReduce=2891, Broadcast=4), rank(3, error=6)]
    found = report(as_json(ranks, [missing(2, host="10.0.0.2", pid=4105, is_dead=True), missing(4)]))
    assert (found.nccl_version, found.names_all_ranks) == ("2.28.9", True)
    (communicator,) = found.communicators
    assert (communicator.hash, communicator.size) == ("0x71a9b4c2d3e4f506", 5)
    assert [(each.rank, each.pid, each.error) for each in communicator.ranks] == [
        (0, 1000, ""),
        (1, 1001, ""),
        (2, 4105, ""),
        (3, 1003, "Remote process error"),
        (4, 1004, ""),
    ]
    assert [each.counts.get("AllReduce") for each in communicator.ranks] == [2892, 2891, None, 0, None]
    assert communicator.ranks[1].counts["Broadcast"] == 4
    assert communicator.ranks[2] == RasRank(
        rank=2, host="10.0.0.2", pid=4105, is_missing=True, is_unresponsive=True, is_dead=True
    )


def test_work_in_progress_is_no_error() -> None:
    (communicator,) = report(as_json([rank(0, error=7)], [])).communicators
    assert communicator.ranks[0].error == ""


def test_an_error_that_is_new_is_an_error() -> None:
    (communicator,) = report(as_json([rank(0, error=42)], [])).communicators
    assert communicator.ranks[0].error == "Unexpected error"


def test_a_process_that_ras_does_not_know_has_no_host() -> None:
    (communicator,) = report(as_json([rank(0, host="unknown", pid=-1)], [])).communicators
    assert (communicator.ranks[0].host, communicator.ranks[0].pid) == ("", 0)


def test_text_names_the_ranks_that_are_unlike_the_others() -> None:
    found = report(BAD_TEXT)
    assert (found.nccl_version, found.names_all_ranks) == ("2.26.2", False)
    assert found.silent_processes == (("10.0.0.2", 4105),)
    assert found.communicators == (
        Communicator(
            hash="0x71a9b4c2d3e4f506",
            size=8,
            ranks=(
                RasRank(rank=0, host="10.0.0.1", pid=4100, counts={"AllReduce": 2892}),
                RasRank(rank=1, host="10.0.0.1", pid=4101, counts={"AllReduce": 2892}),
                RasRank(rank=2, host="10.0.0.1", pid=4102, counts={"AllReduce": 2891}),
                RasRank(rank=3, counts={"AllReduce": 2892}),
                RasRank(rank=5, host="10.0.0.2", pid=4105, is_missing=True, is_unresponsive=True),
                RasRank(rank=7, host="10.0.0.2", pid=4107, counts={"AllReduce": 0}, error="Remote process error"),
            ),
        ),
    )


def test_a_healthy_job_has_nothing_to_name_in_text() -> None:
    assert report(HEALTHY_TEXT) == RasReport(nccl_version="2.26.2")


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"communicators": 3},
        {"communicators": [3, {"ranks": "x"}]},
        {"communicators": [{"ranks": [3]}]},
        {"communicators": [{"ranks": [{"collective_counts": [1]}]}]},
        {"communicators": [{"missing_ranks": [{"status": "x"}], "size": "x"}]},
    ],
)
def test_json_of_another_form_is_no_error(body: object) -> None:
    assert isinstance(report(json.dumps(body)), RasReport)


def test_json_that_is_cut_names_nothing() -> None:
    assert report(as_json([rank(0)], [])[:200]) == RasReport()


@given(st.text(alphabet="#-() 0123456789abcdefRank\nINCOMPLETEGPUmanagedbyprocessonnode", max_size=300))
def test_no_text_is_an_error(text: str) -> None:
    assert isinstance(report(text), RasReport)
