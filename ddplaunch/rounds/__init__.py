"""All decisions about rounds: who takes part, with which ranks, when all nodes stop, and what follows a round, and why.

Which process runs it: one node, its agent; several nodes, whoever has started them, the member of the node that serves
the rendezvous (the table in ``verdict``). The launcher uses the same rules for what nodes report. Pure: no sockets,
threads, clocks or processes, and no torch. Must not know how records are sent.
"""
