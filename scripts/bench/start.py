"""Wall time of whole commands: jobs with almost no work, --help, and a program that is not Python."""

from __future__ import annotations

from functools import partial

from common import DDPLAUNCH, PROGRAMS, REPEATS, TORCHRUN, alternate, check_hosts, compared, print_table, seconds


def job(program: str, workers: int) -> tuple[str, ...]:
    return ("--nproc-per-node", str(workers), str(PROGRAMS / program))


MEASURES = (
    ("all-reduce job, 8 workers", job("all_reduce.py", 8), REPEATS),
    ("all-reduce job, 32 workers", job("all_reduce.py", 32), REPEATS),
    ("DDP step job, 8 workers", job("ddp_step.py", 8), REPEATS),
    ("`--help`", ("--help",), 2 * REPEATS),
    ("no-op program (`--no-python true`)", ("--no-python", "true"), 2 * REPEATS),
)


def main() -> None:
    check_hosts()
    rows = []
    for name, arguments, repeats in MEASURES:
        measures = [partial(seconds, (*command, *arguments)) for command in (TORCHRUN, DDPLAUNCH)]
        rows.append(compared(name, *alternate(*measures, repeats=repeats)))
    print_table("whole commands", rows)


if __name__ == "__main__":
    main()
