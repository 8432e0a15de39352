"""The rendezvous of a run with several nodes: members and coordinator exchange records over a c10d store.

Runs in one process on each node (``member``), forked from the forkserver; on the node that serves the store of the
rendezvous, that process is also the coordinator. Another process (``store``) serves the workers' store, and another
(``tell_without_torch``) tells that a node does not come; only that imports no torch. Must not start or stop workers:
the agent does.
"""
