"""All decisions about rounds: who takes part, with which ranks, when all nodes stop, and what follows a round, and why.

Who has the coordinator: one node, its agent; several nodes, whoever has started them, the member of the node that
serves the rendezvous. The launcher uses the same rules for what nodes report. Pure: no sockets, threads, clocks or
processes, and no torch. Must not know how records are sent.
"""
