"""Checks the pages that `make docs` has built: they work from a folder, and their descriptions are whole sentences.

python tools/check_site.py [FOLDER]    (default: site)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}
LOADED = {"script": "src", "img": "src", "link": "href"}  # what a browser fetches by itself
SECTION = re.compile(r"\b(Args|Attributes|Raises|Returns|Yields): ?\w+: ")
ROLE = re.compile(r":(attr|class|data|exc|func|meth|mod|obj|ref):")
OTHER_MARKUP = re.compile(r"``|::$|(?<!\w)\*\*\w|^```")


class Text(NamedTuple):
    """The text of one element, with its code, and with the word CODE in its place."""

    tag: str
    kind: str  # its class attribute
    text: str
    prose: str


class Page(HTMLParser):
    """Collects what a page loads, and the text of its paragraphs, list items and descriptions."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.texts: list[Text] = []
        self.kinds: list[str] = []
        self.names: set[str] = set()  # words in code
        self._open: list[tuple[str, str, list[str], list[str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        is_fetched = tag != "link" or {"stylesheet", "icon", "preload"} & set(of.get("rel", "").split())
        if is_fetched and of.get(LOADED.get(tag, "")):
            self.loaded.append(of[LOADED[tag]])
        self.kinds.append(of.get("class", ""))
        if tag not in VOID:
            self._open.append((tag, of.get("class", ""), [], []))

    def handle_data(self, data: str) -> None:
        tags = {tag for tag, *_ in self._open}
        if not tags & {"pre", "script", "style"}:
            self.names.update(re.findall(r"\w+", data) if "code" in tags else [])
            for _, _, parts, prose in self._open:
                parts.append(data)
                prose.append("CODE" if "code" in tags else data)

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            opened, kind, *both = self._open.pop()
            if opened in ("p", "li") or "doc-md-description" in kind:
                self.texts.append(Text(opened, kind, *(" ".join("".join(parts).split()) for parts in both)))
            if opened == tag:
                return


def findings_of_loading(site: Path, file: Path, page: Page) -> Iterator[str]:
    """Yields what needs a network or a server, and what is missing."""
    for address in page.loaded:
        if re.match(r"(https?:)?//", address):
            yield f"loads {address} from the network"
        elif not address.startswith("data:") and not (file.parent / re.split("[?#]", address)[0]).exists():
            yield f"loads {address}, which is missing"
    if any("mermaid" in kind.split() for kind in page.kinds):
        yield "has a mermaid block, which needs a script from the network"
    if not any("iframe-worker" in address for address in page.loaded):
        yield "does not load iframe-worker.js, without which a folder has no search"


def findings_of_text(page: Page) -> Iterator[str]:
    """Yields sentences that are cut, and markup that is shown as it is."""
    for tag, kind, text, prose in page.texts:
        if ROLE.search(prose) or OTHER_MARKUP.search(prose):
            yield f"shows markup: {text[:100]}"
        if tag == "p" and SECTION.search(text):
            yield f"shows a section of a docstring as text: {text[:100]}"
        if "doc-md-description" in kind and text:
            begin = re.split(r"[\s,:]", prose)[0]
            if re.fullmatch(r"[a-z]\w*", begin) and "_" not in begin and begin not in page.names:
                yield f"has a description that begins within a sentence: {text[:100]}"
            if not re.search(r"[.:!?][)\"']*$", text):
                yield f"has a description that stops within a sentence: {text[:100]}"
            if re.fullmatch(r"[\w*]+[.:]?", text):
                yield f"has a description that is one name: {text}"


def findings(site: Path) -> Iterator[str]:
    files = sorted(site.rglob("*.html"))
    if not files or not (site / "search" / "search_index.js").exists():
        yield f"{site}: no pages, or no index that the search can read without a server"
    for file in files:
        page = Page(file.read_text())
        of_file = [] if file.name == "404.html" else [*findings_of_loading(site, file, page)]  # its links are absolute
        for finding in [*of_file, *findings_of_text(page)]:
            yield f"{file.relative_to(site)} {finding}"


def main() -> None:
    found = list(findings(Path(sys.argv[1] if sys.argv[1:] else "site")))
    print("\n".join(found), end="\n" * bool(found), file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
