"""A user's mistake, told in one line: what is wrong, what was expected, how to mend it."""


class UserError(Exception):
    """Shown without a traceback by the command line, which then exits with status 2."""


class NonFiniteError(UserError):
    """A network answered with a NaN or an infinity; the message names the turn and the step."""
