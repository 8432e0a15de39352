"""Tracebacks on the console: of one event that stops all ranks, one is shown and the other ranks are named.

Of ranks that have lost a peer none is shown: the failure page says who failed first, and with which traceback.

Runs in the launcher, between what agents send and the console. The log files keep every traceback. Must not change
lines, nor hold any back for long.
"""
