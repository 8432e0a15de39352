"""Agents on other machines: what SSH and commands like srun have in common. Used by transports, which are features.

Runs in the launcher's process. ``remote_start`` makes what starts an agent through any login shell, and checks what it
says of its node; ``command_handle`` starts one by a command that carries stdin and stdout. Must not import torch.
"""
