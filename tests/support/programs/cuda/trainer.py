"""A trainer with the model, its device and its settings in one object, and data loaders that spawn: ``FOLDER``."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    """Names and targets of points; a sample is made in the loader's process, which uses no GPU."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert torch.cuda.device_count() == 2
        features = torch.linspace(-1, 1, 8) * index / 64
        weights = torch.ones(8, device=features.device)
        return {"features": features, "labels": (features * weights).sum(), "name": str(index)}


def to_device(batch, device):
    return {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, features, labels):
        if features.device != self.device:
            raise ValueError(f"features are on {features.device}, the model is on {self.device}")
        mask = torch.ones(features.size(0), device=features.device)
        with torch.autocast(device_type=features.device.type, enabled=False):
            output = self.layers(features.float()).squeeze(-1)
        return ((output - labels.to(output.device)) ** 2 * mask).mean()


class Trainer:
    def __init__(self, model, folder):
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(f"cuda:{local_rank}")
        self.device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=self.device)
        print(f"ready (pid: {os.getpid()})", flush=True)
        self.path = f"{folder}/model.pt"
        self.model = model.to(self.device)
        assert model.device == self.device, f"the model is on {model.device}"
        self.wrapped = DistributedDataParallel(
            model, device_ids=[model.device.index], output_device=model.device.index, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)
        self.scaler = torch.amp.GradScaler(self.device.type)
        self.copy_stream = torch.cuda.Stream()
        data, loading = Pairs(), {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
        self.loader = DataLoader(data, 8, sampler=DistributedSampler(data), pin_memory=True, **loading)

    def batches(self):
        for batch in self.loader:
            assert batch["features"].is_pinned()
            with torch.cuda.stream(self.copy_stream):
                batch = to_device(batch, self.device)
            torch.cuda.current_stream().wait_stream(self.copy_stream)
            yield batch

    def train(self):
        losses, started = [], time.perf_counter()
        for batch in list(self.batches()) * 4:
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, dtype=torch.float16):
                loss = self.wrapped(batch["features"], batch["labels"])
            assert loss.device == self.device
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            losses.append(loss.detach())
        torch.cuda.synchronize(self.device)
        self.log(
            f"{torch.cuda.max_memory_allocated(self.device) / 2**20:.0f} MiB, {time.perf_counter() - started:.1f} s"
        )
        return torch.stack(losses).cpu().numpy()

    def save(self):
        if dist.get_rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "rng": torch.cuda.get_rng_state_all(), "scaler": self.scaler.state_dict()}, self.path)
        dist.barrier(device_ids=[self.device.index])

    def load(self):
        state = torch.load(self.path, map_location=lambda storage, _: storage.cuda(self.device), weights_only=True)
        assert state["model"]["layers.0.weight"].device == self.device
        self.model.load_state_dict(torch.load(self.path, map_location=f"cuda:{self.device.index}")["model"])
        self.optimizer.load_state_dict(torch.load(self.path, map_location="cpu")["optimizer"])
        torch.cuda.set_rng_state_all(state["rng"])
        self.scaler.load_state_dict(state["scaler"])

    def log(self, text):
        if dist.get_rank() == 0:
            print(text, flush=True)


def main():
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(Model(), sys.argv[1])
    before = trainer.train()
    trainer.save()
    trainer.load()
    after = trainer.train()
    trainer.log(f"loss {'fell' if after[-8:].mean() < before[:8].mean() else 'rose'} on {torch.cuda.get_device_name()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
