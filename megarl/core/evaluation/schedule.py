"""When a version is to be scored: 0, whenever a multiple of `every` has been reached, and after the last step."""


def is_due(version: int, last_scored: int | None, every: int, final_version: int) -> bool:
    """Whether these weights need a score, given the newest version that has one (None: none has).

    If an evaluation is lost with its server, the next version is due instead: 100 lost, 101 scored, then 200.
    """
    if last_scored is None:
        return True
    return version > last_scored and (version // every > last_scored // every or version >= final_version)
