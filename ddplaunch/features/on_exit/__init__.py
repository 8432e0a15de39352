"""The user's command at the end of a run, ``--on-exit``.

The launcher runs it. Must not import torch.
"""
