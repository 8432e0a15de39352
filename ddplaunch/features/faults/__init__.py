"""Faults that ``--inject`` makes happen in a dry run: kills, delays, hangs of workers, nodes and connections.

The launcher decides when, the agents act. Must not import torch.
"""
