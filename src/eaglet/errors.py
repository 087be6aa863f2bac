"""The one error a user is meant to read."""


class EagletError(Exception):
    """Bad input or a failed check: one line that names the file, the row and the remedy.

    The command line prints the message alone and exits with status 1; anything else that is raised is a bug
    and keeps its traceback.
    """
