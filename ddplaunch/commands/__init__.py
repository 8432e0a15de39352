"""Commands other than a run, such as --plan, --check, --ps and --kill; modules named ``*_page`` make their text.

Runs in the process that the user started. A command is a function of a Request, and has a row in ``cli.commands``. Some
start agents through the transports and query them. --check also runs a job. Only the command line imports this package.
"""
