"""Writes what it was given to the file named by DUMP_TO: arguments, and the environment variables DUMP_*, as hex."""

import json
import os
import sys

arguments = [os.fsencode(argument).hex() for argument in sys.argv[1:]]
environ = {name: os.fsencode(value).hex() for name, value in os.environ.items() if name.startswith("DUMP_")}
with open(os.environ["DUMP_TO"], "w") as file:
    json.dump({"arguments": arguments, "environ": environ}, file)
