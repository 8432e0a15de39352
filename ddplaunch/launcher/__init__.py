"""One run, from its start to its outcome: ``run.py`` has the loop, and names its parts.

``Nodes`` has agents and sweeps; ``Participants``, who takes part and where they meet; ``LostNodes``, what a loss means,
as ``Pings`` and ``RecordChecks`` notice it; ``Attempts``, the results of all nodes; ``Shutdown``, the end; ``Watches``,
the features. Runs in the launcher's process: that of the ``ddplaunch`` command, or of a program that calls
``ddplaunch.launch``. The calling thread owns all state. Starts processes and reaches other machines through
``transport`` only; never imports torch, nor anything of the agent, the rendezvous or the worker.
"""
