"""What an injected failure did and how the job answered, as one sentence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.model import Injected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.injection import Injection  # noqa: TC004
    from ddplaunch.model import AttemptResult, RunResult


@dataclass
class Case:
    """One injection and how far it came; moments are ``time.monotonic()``, None where it did not come so far.

    Attributes:
        host: where it was to happen.
        started_s: when its attempt ran there; from then on it was waited for.
        asked_s: when its moment had come.
        happened_s: when it was done.
    """

    injection: Injection
    host: str = ""
    started_s: float | None = None
    asked_s: float | None = None
    happened_s: float | None = None


def account(case: Case, starts: Mapping[int, float], result: RunResult) -> Injected:
    """What became of it. ``starts`` says when each attempt began to run."""
    injection, started_s, happened_s = case.injection, case.started_s, case.happened_s
    if happened_s is None or started_s is None:
        return Injected(injection.text, None, f"did not happen: {_why_not(case, starts, result)}")
    after_s = happened_s - started_s
    did = f"{_deed(injection, case.host)} {after_s:.1f} s into attempt {injection.attempt}"
    return Injected(injection.text, after_s, f"{did}; {_answer(injection.attempt, happened_s, starts, result)}")


def _deed(injection: Injection, host: str) -> str:
    rank = f"rank {injection.rank} on {host}"
    match injection.what:
        case "kill":
            return f"{rank} got SIGKILL"
        case "exit":
            return f"{rank} ended with exit code {injection.code}"
        case "hang":
            return f"{rank} was stopped (SIGSTOP)"
        case "slow":
            return f"{rank} began to take {injection.by:g} times as long,"
        case "lose":
            return f"all processes of {host} vanished"
        case "partition":
            return f"{host} was cut off {'to the end' if injection.for_s is None else f'for {injection.for_s:g} s'},"
        case "crash agent":
            return f"the agent on {host} got SIGKILL"


def _why_not(case: Case, starts: Mapping[int, float], result: RunResult) -> str:
    injection, number = case.injection, case.injection.attempt
    attempt = _attempt(number, result)
    who = f"node {injection.node}" if injection.rank is None else f"rank {injection.rank}"
    if case.started_s is None:
        return f"attempt {number} had no {who}" if number in starts else f"attempt {number} did not come to run"
    if case.asked_s is not None:
        return f"{who} had ended before"
    if injection.after_line is not None:
        return f"no such line came to the console from {who} in attempt {number}"
    return f"attempt {number} was over after {attempt.duration_s:.1f} s" if attempt else f"{case.host} was lost before"


def _attempt(number: int, result: RunResult) -> AttemptResult | None:
    return next((attempt for attempt in result.attempts if attempt.attempt == number), None)


def _answer(number: int, happened_s: float, starts: Mapping[int, float], result: RunResult) -> str:
    """How the job went on."""
    next_number = min((later for later in starts if later > number), default=None)
    verdict = f"the job {_verdict(result)}"
    if next_number is not None:
        later_s = starts[next_number] - happened_s
        return f"attempt {next_number} ran {later_s:.2f} s later, and {verdict}"
    attempt = _attempt(number, result)
    if attempt and attempt.outcome == "succeeded" and result.outcome == "succeeded":
        return f"the attempt went on, and {verdict}"
    return verdict


def _verdict(result: RunResult) -> str:
    if result.outcome == "stopped" and result.signal:
        return f"was stopped by {result.signal}"
    return "succeeded" if result.outcome == "succeeded" else f"ended with exit code {result.exit_code}"
