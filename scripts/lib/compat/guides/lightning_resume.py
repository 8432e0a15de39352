"""Fits with Lightning, and goes on from the last checkpoint. Argument: the folder for checkpoints."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class FailOnce(Callback):
    def on_train_epoch_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        print(f"epoch {trainer.current_epoch}", flush=True)
        if trainer.current_epoch == 2 and trainer.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("fails once, in epoch 2")


def main() -> None:
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        callbacks=[ModelCheckpoint(dirpath=sys.argv[1], save_last=True), FailOnce()],
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(torch.randn(64, 8), batch_size=4), ckpt_path="last")


if __name__ == "__main__":
    main()
