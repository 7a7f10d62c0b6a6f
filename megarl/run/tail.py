"""Reading a file that another process appends to."""

from pathlib import Path

from megarl.core.base.rundir import Row, parsed


class Tail:
    """Reads a growing file: `new()` returns complete lines since the last call; an unfinished last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """Return complete lines since the last call, without line ends; bytes that are not UTF-8 are replaced."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode(errors="replace").splitlines()

    def new(self) -> list[Row]:
        """Return rows since the last call; a line truncated by a crash is skipped."""
        return [row for line in self.lines() if (row := parsed(line)) is not None]
