"""The forkserver, the code that runs in a worker's process before the user's script, and what a script may call.

Imports torch before the script does. The script must see the process as ``python -u script.py`` would set it up. The
agent sends records; nothing is imported from ``agent``.
"""
