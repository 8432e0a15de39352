"""Wall time of a dry run of two and four nodes, compared with torchrun and 16 workers on one node."""

from __future__ import annotations

from functools import partial

from common import DDPLAUNCH, PROGRAMS, TORCHRUN, alternate, check_hosts, compared, print_table, seconds, size

WORKERS = size("BENCH_WORKERS", 8, 1)
NODES = size("BENCH_NODES", (2, 4), (1,))
SCRIPT = str(PROGRAMS / "all_reduce.py")


def main() -> None:
    check_hosts()
    one_node = partial(seconds, (*TORCHRUN, "--nproc-per-node", str(2 * WORKERS), SCRIPT))
    dry_run = (*DDPLAUNCH, "--dry-run", "--nproc-per-node", str(WORKERS), "--nnodes")
    torchrun_s, *dry_run_s = alternate(one_node, *(partial(seconds, (*dry_run, str(nodes), SCRIPT)) for nodes in NODES))
    job = f"all-reduce job, {2 * WORKERS} workers on one node"
    rows = [
        compared(f"{job} / {nodes} x {WORKERS} dry run", torchrun_s, own_s)
        for nodes, own_s in zip(NODES, dry_run_s, strict=True)
    ]
    print_table("dry run", rows)


if __name__ == "__main__":
    main()
