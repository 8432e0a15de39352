"""The workers of one attempt on one node: placement, start, output, signals and exits.

Runs in the agent's process, in the main thread; one thread per output stream reads it. Must not depend on other nodes
or on the rendezvous.
"""
