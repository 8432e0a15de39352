"""The forkserver, the code that runs in a worker's process before the user's script, and what a script may call.

Imports torch before the script does. The script must see the process as ``python -u script.py`` would set it up. The
agent sends records; nothing is imported from ``agent``.

A forked worker: ``forkserver.main`` returns the worker's preparation to the interpreter's outermost frame
(``forkserver._become``, ``bootstrap.prepare``), which then executes ``bootstrap.OUTERMOST``: ``bootstrap.script``
prepares ``__main__`` and returns the call that runs the script, ``caught`` keeps its exception and sets ``exit_code``,
``finished`` writes the error file and prints. The interpreter's last atexit function, ``exit._finish``, ends the
process with ``exit_code``. A worker that is executed begins in ``exec_worker.main``, and ends as the interpreter does.
"""
