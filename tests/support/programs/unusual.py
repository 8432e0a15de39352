"""Runs the command in its arguments where little is as usual: limits, priorities, signals, CPUs."""

import os
import resource
import signal
import sys

os.umask(0o027)
os.nice(3)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGRTMIN + 2])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 500))
resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("300")
os.execv(sys.argv[1], sys.argv[1:])
