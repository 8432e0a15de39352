"""Records that the processes of a run exchange, and pure rules that several of them apply.

Imported by launcher, agent, forkserver, rendezvous and workers. Records are frozen dataclasses, one JSON object each;
``wire`` checks them when it decodes them. Must not start a process, open a file or keep state.
"""
