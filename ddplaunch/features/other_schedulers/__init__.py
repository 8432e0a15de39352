"""Schedulers besides SLURM, and MPI launchers: what starts ddplaunch names the nodes.

Runs in the launcher, before the configuration is built. ``tables`` has their rows, ``readers`` reads the
variables. Must not import torch.
"""
