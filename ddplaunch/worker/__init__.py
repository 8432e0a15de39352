"""The forkserver and what runs in a worker before the user's script. Imports torch."""
