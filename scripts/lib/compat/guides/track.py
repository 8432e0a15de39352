"""Logs to W&B and TensorBoard over a restart. Argument: the folder for logs."""

import os
import sys

import torch
import torch.distributed as dist
import wandb
from torch.utils.tensorboard import SummaryWriter


def main() -> None:
    folder = sys.argv[1]
    dist.init_process_group("gloo")
    checkpoint = f"{folder}/step.pt"
    first_step = torch.load(checkpoint) if os.path.exists(checkpoint) else 0

    if dist.get_rank() == 0:
        run_id = os.environ["TORCHELASTIC_RUN_ID"]
        wandb.init(project="digits", id=run_id, resume="allow", dir=folder)
        writer = SummaryWriter(f"{folder}/tensorboard/{run_id}", purge_step=first_step)

    for step in range(first_step, 4):
        if step == 2 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("fails once, in step 2")
        if dist.get_rank() == 0:
            wandb.log({"loss": 1 / (step + 1)}, step=step)
            writer.add_scalar("loss", 1 / (step + 1), step)
            torch.save(step + 1, f"{checkpoint}.tmp")
            os.replace(f"{checkpoint}.tmp", checkpoint)
        dist.barrier()

    if dist.get_rank() == 0:
        writer.close()
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
