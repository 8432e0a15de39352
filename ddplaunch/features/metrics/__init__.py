"""The metrics of a run as a file in Prometheus' text format, ``--metrics-file``.

Written by the launcher every 10 s. Must not import torch.
"""
