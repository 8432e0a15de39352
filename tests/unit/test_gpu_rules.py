"""Every rule about a GPU fires at its threshold and not just below it; the values come through the real binding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddplaunch.features.gpus.records import GpuReading
from ddplaunch.features.health import rules
from ddplaunch.features.health.rules import RULES
from tests.support import golden
from tests.support.fake_nvml import Says

HISTORY = {"throttled-often", "nvlink-errors"}
ELSEWHERE = {"lost"}


def test_each_rule_fires_at_its_threshold_and_in_the_run_when_a_gpu_begins_to_break_it(
    driver: Says, watch: Any
) -> None:
    """A question is what the driver says of a GPU."""
    in_run = {rule.name: rule.in_run for rule in RULES}
    questions = golden.questions("gpu_rules")
    gpus = dict(zip(questions, _read(driver, watch, questions), strict=True))
    sound = [gpu for gpu in gpus.values() if not rules.at_start(gpu)]
    broken: set[str] = set()

    def told(question: str) -> str:
        gpu = gpus[question]
        found = rules.at_start(gpu)
        for before in (*sound, None):
            begun = [finding.rule for finding in rules.while_running(before, gpu)]
            assert begun == [finding.rule for finding in found if in_run[finding.rule]]
        assert all(rules.while_running(gpu, after) == () for after in (gpu, *sound))
        assert {(finding.gpu, finding.uuid) for finding in found} <= {(gpu.index, gpu.uuid)}
        broken.update(finding.rule for finding in found)
        return "; ".join(f"{finding.rule}: {finding.text}" for finding in found) or "sound"

    golden.check_answers("gpu_rules", told)
    assert broken | HISTORY | ELSEWHERE == in_run.keys()


def _read(driver: Says, watch: Any, questions: list[str]) -> tuple[GpuReading, ...]:
    """All as GPUs of one machine, of a name each; one more GPU has all NVLinks, which count by name."""
    names = [f"case {index}" for index in range(len(questions))]
    linked = names[questions.index("nvlinks 101")]
    gpus = [*zip(names, questions, strict=True), (linked, "nvlinks 111")]
    lines = [
        f"{index} {value}" for index, (name, own) in enumerate(gpus) for value in (*own.split(" / "), f"name {name}")
    ]
    driver(f"gpus {len(gpus)}", *lines)
    return watch().until_read(lambda _: True).gpus[:-1]  # A busy machine may say first that it takes long.


@pytest.mark.parametrize(
    ("name", "field", "most"),
    [("throttled-often", "throttled_minutes", 5), ("nvlink-errors", "nvlink_error_minutes", 15)],
)
def test_rules_about_the_last_minutes_have_a_threshold(name: str, field: str, most: int) -> None:
    gpu = GpuReading(index=0)
    assert rules.at_start(replace(gpu, **{field: most})) == ()
    assert [finding.rule for finding in rules.at_start(replace(gpu, **{field: most + 1}))] == [name]


def test_more_errors_that_could_not_be_corrected_are_told_each_time() -> None:
    gpus = [GpuReading(index=0, uncorrected_errors=count) for count in (1, 1, 3)]
    assert rules.while_running(gpus[0], gpus[1]) == ()
    (finding,) = rules.while_running(gpus[1], gpus[2])
    assert (finding.text, finding.is_fault) == (
        "3 memory errors could not be corrected since its driver was loaded",
        True,
    )


def test_a_lost_gpu_is_a_lasting_fault() -> None:
    (finding,) = rules.while_running(GpuReading(index=3), GpuReading(index=3, uuid="GPU-3", error="GPU is lost"))
    assert (finding.rule, finding.severity, finding.is_fault, finding.gpu) == ("lost", "refuse", True, 3)


def test_what_only_warns_at_the_start_explains_no_later_failure() -> None:
    gpu = GpuReading(index=0, uncorrected_errors=1, is_remap_failed=True)
    assert {finding.rule: finding.is_fault for finding in rules.at_start(gpu)} == {
        "row-remap-failed": True,
        "uncorrected-errors": False,
    }
