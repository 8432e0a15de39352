"""Trains a small GPT-2 with transformers' Trainer. Arguments are fields of TrainingArguments: ``bf16=True``."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Numbers(torch.utils.data.Dataset):
    """Texts that count."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 50
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    given = dict(argument.split("=") for argument in sys.argv[1:])
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        **{name: value == "True" if value in ("True", "False") else value for name, value in given.items()},
    )
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Numbers(), eval_dataset=Numbers())
    trainer.train()
    assert arguments.device.type == "cuda"
    assert 0 < trainer.state.log_history[-1]["train_loss"] < 5


if __name__ == "__main__":
    main()
