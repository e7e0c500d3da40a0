"""The one error a command-line user is meant to read."""


class UserError(ValueError):
    """Wrong input: which key or file, what was found, what is allowed, what to do. Shown without a traceback."""
