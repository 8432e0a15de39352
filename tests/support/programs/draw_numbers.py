"""Writes random numbers of all kinds to FOLDER/ATTEMPT-RANK.json; rank 0 fails in attempt 0, once all have drawn."""

import json
import os
import random
import sys
import time
import uuid
from pathlib import Path

import numpy
import torch

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
drawn = {
    "torch": torch.rand(2).tolist(),
    "torch's seed": torch.initial_seed(),
    "dropout": torch.nn.functional.dropout(torch.ones(64)).tolist(),
    "numpy": numpy.random.rand(2).tolist(),
    "numpy's generator": numpy.random.default_rng().random(2).tolist(),
    "random": random.random(),
    "uuid": str(uuid.uuid4()),
    "urandom": os.urandom(8).hex(),
}
folder = Path(sys.argv[1])
part = folder / f"part-{rank}"
part.write_text(json.dumps(drawn))
part.rename(folder / f"{attempt}-{rank}.json")
print(f"ready (pid: {os.getpid()})", flush=True)
if attempt == 0:
    while len(list(folder.glob("0-*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == 0:
        sys.exit(1)
    time.sleep(60)
