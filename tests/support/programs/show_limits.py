"""Shows the limits a worker runs under."""

import resource

print(f"open files {resource.getrlimit(resource.RLIMIT_NOFILE)}", flush=True)
