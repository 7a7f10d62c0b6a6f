"""What a browser would make of a page of one file."""

import re
from html.parser import HTMLParser


class Resources(HTMLParser):
    """Everything a page would load, the texts of its scripts, its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")
        self.found += [
            f"{tag} {name}"
            for name, _ in attrs
            if name in ("src", "href", "srcset", "data", "action")
        ]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def asks_the_network(text: str) -> bool:
    """Whether a script or a style would."""
    return (
        re.search(r"https?:|url\((?!#)|@import|fetch\(|XMLHttpRequest|import\s", text) is not None
    )
