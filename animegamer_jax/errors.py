"""A user's mistake, told in one line: what is wrong, what was expected and found, how to mend it."""


class UserError(Exception):
    """Shown without a traceback by the command line, which then exits with status 2."""
