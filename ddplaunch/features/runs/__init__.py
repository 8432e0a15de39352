"""Which runs there are, for other features: finds their folders, reads their files, asks the agents of other hosts.

``run_json`` runs in each process, the other modules in that of the command. Only reads. Must not import torch.
"""
