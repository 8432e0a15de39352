"""Trains with transformers' Trainer, and goes on from the newest whole checkpoint. Argument: the folder for them."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


def newest_checkpoint(folder: str) -> str | None:
    """The file trainer_state.json is written last: a checkpoint without it is not whole."""
    found = [path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


class FailOnce(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == 3 and args.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("fails once, in step 3")


def main() -> None:
    data = [{"input_ids": tokens, "labels": tokens} for tokens in (torch.arange(16) + torch.arange(32)[:, None]) % 50]
    arguments = TrainingArguments(
        output_dir=sys.argv[1], max_steps=4, save_steps=2, per_device_train_batch_size=4, report_to=[]
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[FailOnce()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(arguments.output_dir))


if __name__ == "__main__":
    main()
