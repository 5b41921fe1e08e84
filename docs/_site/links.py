"""Checks the links between the built pages: every page, picture and anchor that they lead to is there."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Collects what a page leads to, and the anchors that it has.

    Attributes:
        targets: addresses in ``href`` and ``src``.
        anchors: values of ``id``.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes a tag's attributes."""
        for name, value in attrs:
            if value is not None and name in ("href", "src"):
                self.targets.append(value)
            elif value is not None and name == "id":
                self.anchors.add(value)


def broken(folder: Path) -> list[str]:
    """Lines ``page: address``, of links within the pages of a folder that lead to no file or no anchor."""
    files = sorted(folder.rglob("*.html"))
    pages = {file.resolve(): Page(file.read_text()) for file in files}
    out = []
    for file, page in pages.items():
        for address in page.targets:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchors = pages[there].anchors if there in pages else set()
            if not there.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                out.append(f"{file.relative_to(folder.resolve()).as_posix()}: {address}")
    return out


def check(app: Any, failure: Exception | None) -> None:
    """Warns of broken links, which ends a strict build; Sphinx's event ``build-finished``."""
    from sphinx.util import logging

    if failure is None and app.builder.format == "html":
        for line in broken(Path(app.outdir)):
            logging.getLogger(__name__).warning("a link leads to nothing: %s", line)
