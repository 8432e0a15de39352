"""Starts an agent on a machine and exchanges records with it: on this one, by a command, or over SSH (``ssh``).

Runs in the launcher's process. A transport starts, sweeps and closes; an AgentHandle sends and posts what arrives.
Neither interprets a record. Callers use the same methods for every transport.
"""
