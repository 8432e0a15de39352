"""One run, from its start to its outcome: agents, attempts, loss of nodes, shutdown, report. ``run.py`` has the loop.

Runs in the launcher's process: that of the ``ddplaunch`` command, or of a program that calls ``ddplaunch.launch``. The
calling thread owns all state. Starts processes and reaches other machines through ``transport`` only; never imports
torch, nor anything of the agent, the rendezvous or the worker.
"""
