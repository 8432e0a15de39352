"""Writes as many bytes of any kind to stdout as argument 1 says, a few to stderr; rank 1 fails in the first attempt."""

import os
import random
import sys

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
sys.stdout.buffer.write(random.Random(10 * attempt + rank).randbytes(int(sys.argv[1])))
sys.stdout.flush()
print(f"rank {rank} in attempt {attempt}", file=sys.stderr)
if (rank, attempt) == (1, 0):
    raise RuntimeError("once")
