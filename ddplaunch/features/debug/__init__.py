"""Debugging sessions: a rank of any node stops in a debugger, and the user's terminal is connected with it.

Parts in the launcher, the agent and the worker; ``records`` is what they say to each other. Only the worker's part
imports torch.
"""
