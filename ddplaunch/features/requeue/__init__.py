"""SLURM's requeue of the job that contains the run, when SLURM's signal says that its time is up.

The launcher asks ``scontrol``. Must not import torch.
"""
