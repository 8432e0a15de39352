"""All decisions about rounds: who takes part, with which ranks, when all nodes stop, and what follows a round, and why.

Used by the agent of a single node, by the coordinator's process of several nodes, and by the launcher for what nodes
report. Pure: no sockets, threads, clocks or processes, and no torch. Must not know how records are sent.
"""
