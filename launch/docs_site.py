"""Files of the repository that pages link to, as pages of the site.

A page links to `../../megarl/run/health.py`, which exists in the repository and not in
the site. Each such file becomes a page of the site, under repository/: text as a block
of code, Markdown as it is. So the links work in both, and need no network.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash"}
LANGUAGES |= {".json": "json", ".toml": "toml"}
COPIED = {".png", ".svg", ".gz"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""Search finds what pages say, not what files of the repository contain."""


def targets(page: str) -> list[str]:
    """Return the paths in the repository to which a page links."""
    folder = os.path.dirname(page)
    links = LINK.findall((ROOT / page).read_text())
    return [os.path.normpath(os.path.join(folder, target)) for target, _ in links]


def repository_files(docs: list[str]) -> list[str]:
    """Return the files and folders outside docs/ to which these pages lead, directly or
    by further pages.
    """
    paths: dict[str, None] = {}
    unread = list(docs)
    while unread:
        for path in targets(unread.pop()):
            if path.startswith("docs/") or path in paths:
                continue
            paths[path] = None
            if path.endswith(".md"):
                unread.append(path)
    return list(paths)


def uri(path: str) -> str:
    """Return where in the site's sources a file of the repository is."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    is_as_it_is = path.endswith(".md") or Path(path).suffix in COPIED
    return f"repository/{path}" if is_as_it_is else f"repository/{path}.md"


def text_of(path: str) -> str:
    """Return the page that shows a file or folder of the repository."""
    file = ROOT / path
    if path.endswith(".md"):
        return UNSEARCHED + file.read_text()
    if file.is_dir():
        text = "\n".join(sorted(entry.name for entry in file.iterdir()))
    else:
        text = file.read_text()
    language = LANGUAGES.get(file.suffix, "")
    return f"{UNSEARCHED}# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's files that pages link to."""
    docs = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    for path in repository_files(docs):
        if Path(path).suffix in COPIED:
            file = File.generated(config, uri(path), abs_src_path=str(ROOT / path))
        else:
            file = File.generated(config, uri(path), content=text_of(path))
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the page's links lead to where the site has their files."""
    source = page.file.src_uri
    path = (
        source.removeprefix("repository/") if source.startswith("repository/") else f"docs/{source}"
    )
    if not path.endswith(".md") or not (ROOT / path).exists():
        return markdown
    folder = os.path.dirname(path)

    def site_link(link: re.Match[str]) -> str:
        target = uri(os.path.normpath(os.path.join(folder, link[1])))
        return f"]({os.path.relpath(target, os.path.dirname(source))}{link[2] or ''})"

    return LINK.sub(site_link, markdown)
