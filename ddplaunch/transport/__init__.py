"""Starts an agent on this machine, and exchanges records with agents anywhere. Other transports are features.

Runs in the launcher's process. A transport starts, sweeps and closes; an AgentHandle sends and posts what arrives.
Neither interprets a record. Callers use the same methods for every transport.
"""
