"""The one exception a user should ever meet."""


class UserError(Exception):
    """A mistake the user can mend: one sentence that says what is wrong and what to do about it.

    The command line prints it without a traceback and exits with 2.
    """
