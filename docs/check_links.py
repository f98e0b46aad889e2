"""Finds internal links of the built site that lead nowhere: `python docs/check_links.py SITE`."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and the places of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            if name == "id" and value:
                self.places.add(value)


def broken_links(site: Path) -> list[str]:
    """The internal links that lead nowhere, as "page: link"."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            places = pages[target].places if target in pages else set()
            is_there = target.is_file() and (not parts.fragment or target not in pages or parts.fragment in places)
            if not is_there:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


if __name__ == "__main__":
    broken = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(broken), end="\n" if broken else "")
    sys.exit(bool(broken))
