"""``print_lines.py COUNT``: prints COUNT lines, each with the rank and the number of the line."""

import os
import sys

rank = os.environ["RANK"]
for number in range(int(sys.argv[1])):
    print(f"rank {rank} step {number} loss 0.693147 lr 0.001000")
