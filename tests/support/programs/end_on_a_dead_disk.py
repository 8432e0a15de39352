"""Creates the file of its first argument, upon which a disk dies, and goes on as exit_with.py with the others."""

import sys

from exit_with import main

open(sys.argv.pop(1), "w").close()
print("the disk is dead", flush=True)
main()
