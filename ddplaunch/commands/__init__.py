"""Commands other than a run: --plan, --check, --ps, --stacks and --kill; modules named ``*_page`` make their text.

Runs in the process that the user started. Starts agents through the transports and queries them. --check also runs a
job. Only the command line imports this package.
"""
