"""The page of a run: reads a run folder, and writes ``run.html`` into it.

Runs in a child process of the launcher while a run goes on, and in the user's process for ``--page`` and ``--serve``.
Files may be missing, cut off anywhere, damaged, or of another version: what cannot be read is left out, and the page
says so. All text comes from other processes: it is escaped. Must not need the network, nor write anything else.
"""
