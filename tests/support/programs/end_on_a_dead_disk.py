"""Lets a disk die, and goes on as exit_with.py with its other arguments.

The first argument is a file, which is created: dying_files.c watches it. Or it is the folder of an ext4 file system,
which is shut down: from then on, each operation on it fails with EIO.
"""

import contextlib
import fcntl
import os
import struct
import sys

from exit_with import main

SHUTDOWN, WITHOUT_WRITING_THE_JOURNAL = 0x8004587D, 2

path = sys.argv.pop(1)
if os.path.isdir(path):
    with contextlib.suppress(OSError):  # The other rank has done it.
        folder = os.open(path, os.O_RDONLY)
        fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", WITHOUT_WRITING_THE_JOURNAL))
        os.close(folder)
else:
    open(path, "w").close()
print("the disk is dead", flush=True)
main()
