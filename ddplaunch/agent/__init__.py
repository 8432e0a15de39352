"""The agent: runs one node's part of a run, with an event loop, a rendezvous and a channel to the launcher.

Runs in the agent's process, one per node. Only the main thread changes state and starts, signals and reaps processes.
Must not import torch, or code of the launcher, the rendezvous process or the workers: it exchanges records with them.
"""
