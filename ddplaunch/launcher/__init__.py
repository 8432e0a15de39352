"""The process the user starts: starts agents, shows output, decides the verdict. Never imports torch."""
