"""Errors for the user, in one line: what is wrong, what was expected, and what to do."""


class UserError(Exception):
    """Printed by the command line without a traceback; the exit status is 2."""


class NonFiniteError(UserError):
    """A network returned a NaN or an infinity; the message names the turn and the step."""
