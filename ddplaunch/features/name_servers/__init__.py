"""A name server that does not answer delays no start, and the user learns what to do about it.

torch looks up the name of the peer of a connection and waits for the answer, by default 10 s and more, at every start.
"""
