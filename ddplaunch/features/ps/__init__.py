"""The runs that have processes on this and other hosts, and their end: ``--ps`` and ``--kill``.

The commands run in the process that the user started; ``run_finder`` runs in an agent without a run. Must not import
torch.
"""
