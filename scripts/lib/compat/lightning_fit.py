"""Fits a small model with Lightning. Arguments: the strategy and the precision."""

import sys
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.log("number", torch.tensor(number, device=self.device), sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("validation", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    strategy, precision = sys.argv[1:]
    batches = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=strategy,
        precision=precision,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(Model(), batches, batches)
    assert {"loss_epoch", "number", "validation"} <= trainer.callback_metrics.keys()


if __name__ == "__main__":
    main()
