"""What a run waits for, shown to the user: nodes that connect, imports of torch, and sweeps of lost nodes at the end.

Runs in the launcher. Only shows messages; nothing depends on it.
"""
