"""Wall time of whole commands: jobs with almost no work, --help, and a program that is not Python."""

from __future__ import annotations

from functools import partial

from common import DDPLAUNCH, PROGRAMS, REPEATS, TORCHRUN, alternate, check_hosts, compared, print_table, seconds, size


def job(program: str, workers: int) -> tuple[str, ...]:
    return ("--nproc-per-node", str(workers), str(PROGRAMS / program))


WORKERS, DDP_WORKERS = size("BENCH_WORKERS", (8, 32), ()), size("BENCH_DDP_WORKERS", 8, 1)
CHECK = ("--check-first", "quick")
"""Only ddplaunch has it."""

MEASURES = (
    *((f"all-reduce job, {count} workers", job("all_reduce.py", count), REPEATS) for count in WORKERS),
    *((f"the same with `{' '.join(CHECK)}`", (*CHECK, *job("all_reduce.py", count)), REPEATS) for count in WORKERS),
    (f"DDP step job, {DDP_WORKERS} workers", job("ddp_step.py", DDP_WORKERS), REPEATS),
    ("`--help`", ("--help",), 2 * REPEATS),
    ("no-op program (`--no-python true`)", ("--no-python", "true"), 2 * REPEATS),
)


def main() -> None:
    check_hosts()
    rows = []
    for name, arguments, repeats in MEASURES:
        of_both = tuple(word for word in arguments if word not in CHECK)
        measures = [partial(seconds, (*TORCHRUN, *of_both)), partial(seconds, (*DDPLAUNCH, *arguments))]
        rows.append(compared(name, *alternate(*measures, repeats=repeats)))
    print_table("whole commands", rows)


if __name__ == "__main__":
    main()
