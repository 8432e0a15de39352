"""Wall time of a dry run of two and four nodes, compared with torchrun and 16 workers on one node."""

from __future__ import annotations

from functools import partial

from common import DDPLAUNCH, PROGRAMS, TORCHRUN, alternate, check_hosts, compared, print_table, seconds

SCRIPT = str(PROGRAMS / "all_reduce.py")


def main() -> None:
    check_hosts()
    one_node = partial(seconds, (*TORCHRUN, "--nproc-per-node", "16", SCRIPT))
    two_nodes = partial(seconds, (*DDPLAUNCH, "--dry-run", "--nnodes", "2", "--nproc-per-node", "8", SCRIPT))
    four_nodes = partial(seconds, (*DDPLAUNCH, "--dry-run", "--nnodes", "4", "--nproc-per-node", "8", SCRIPT))
    torchrun_s, two_s, four_s = alternate(one_node, two_nodes, four_nodes)
    rows = [
        compared("all-reduce job, 16 workers on one node / 2 x 8 dry run", torchrun_s, two_s),
        compared("all-reduce job, 16 workers on one node / 4 x 8 dry run (32 workers)", torchrun_s, four_s),
    ]
    print_table("dry run", rows)


if __name__ == "__main__":
    main()
