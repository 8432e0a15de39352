"""The usage samples: what workers, GPUs and nodes use while a job runs, every 2 s, and the live table of a run.

The agents take the samples, the launcher writes them to the run folder. Must not import torch.
"""
