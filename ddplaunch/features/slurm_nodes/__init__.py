"""The nodes of a SLURM job that SLURM drains or loses while a run goes on.

The launcher asks ``scontrol`` from time to time, and lets a node leave the run. Must not import torch.
"""
