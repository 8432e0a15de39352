"""Rank 1 ends by a function of ddplaunch; the others wait until they are stopped.

``ask.py give_up REASON [how]``; how: ``main`` (the default), ``thread``, ``record`` for torch's decorator, ``caught``
for a script that catches the SystemExit and fails in another way, ``forked`` for a child process. ``world:N``: only if
there are N ranks.
"""

import os
import signal
import sys
import threading

import ddplaunch

name, reason, how = (*sys.argv[1:], "main")[:3]


def ask() -> None:
    getattr(ddplaunch, name)(reason)


def main() -> None:
    if how == "thread":
        threading.Thread(target=ask).start()
        signal.pause()
    elif how == "record":
        from torch.distributed.elastic.multiprocessing.errors import record

        record(ask)()
    elif how == "caught":
        try:
            ask()
        except SystemExit:
            raise RuntimeError("caught") from None
    elif how == "forked":
        pid = os.fork()
        if pid == 0:
            ask()
        os.waitpid(pid, 0)
        raise RuntimeError("its child has ended")
    else:
        ask()


if how.startswith("world:") and os.environ["WORLD_SIZE"] != how[6:]:
    print("goes on", flush=True)
elif os.environ["RANK"] == "1":
    main()
else:
    signal.pause()
