"""The one kind of error users see: what is wrong, where, what to do. The CLI prints its text and exits with status 2."""


class MegarlError(Exception):
    """Bad input, or a wait that ran out. Its text is complete: no traceback is shown."""
