"""Lines that a worker draws again and again with carriage returns, like progress bars, on a console of several ranks.

A terminal shows one live line per rank below the other output; elsewhere a rank shows a redraw now and then. The log
files keep every byte. Runs in the launcher, between what agents send and the console. Must not hold finished
lines back.
"""
