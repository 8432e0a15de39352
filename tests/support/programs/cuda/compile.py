"""A model compiled as one graph, with devices named inside."""

import os

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        positions = torch.arange(4, device=x.device) + torch.zeros(4, device="cuda") + torch.ones(4, device=1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.layer(x.to("cuda:0") + positions.cuda())
        return y.float().to(torch.device("cuda", 0))


def main():
    print(f"ready (pid: {os.getpid()})", flush=True)
    model = Model().cuda()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(2, 4, device="cuda")
    torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1
    print("compiled without a break", flush=True)


if __name__ == "__main__":
    main()
