"""One process per node: starts, watches and stops that node's workers. Never imports torch."""
