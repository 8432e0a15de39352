"""Schedulers besides SLURM: MPI's launchers, LSF, PBS and Kubernetes. What starts ddplaunch names the nodes.

Runs in the launcher, before the configuration is built. ``tables`` has their rows, ``readers`` reads the
variables. Must not import torch.
"""
