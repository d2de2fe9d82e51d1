"""Rules of accessible HTML that a program can check, and the contrast of a style sheet's colours."""

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise

VOID = {"meta", "link", "input", "br", "hr", "img"}
CONTROLS, HEADINGS = ("input", "select", "textarea"), ("h1", "h2", "h3", "h4", "h5", "h6")
NAMED = ("a", "button", "caption", "title", *HEADINGS)  # must hold words


class Page(HTMLParser):
    """A page's elements with their attributes, and what breaks a rule."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.problems: list[str] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self._tables: list[bool] = []  # open tables: whether something names them
        self.feed(html)
        self.close()
        self.problems += [*self._headings(), *self._references(), *self._landmarks()]

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in given}
        self.found.append((tag, attributes))
        labelled = {"aria-label", "aria-labelledby"} & attributes.keys()
        is_seen = attributes.get("type") != "hidden"
        if tag in CONTROLS and is_seen and not labelled and "label" not in (name for name, _, _ in self._open):
            self.problems.append(f"{tag} {attributes.get('name')} has no label")
        if tag == "th" and attributes.get("scope") not in ("col", "row"):
            self.problems.append("a th has no scope")
        if tag == "svg" and (attributes.get("role") != "img" or not labelled):
            self.problems.append("a drawing has no name")
        if tag == "section" and not labelled and attributes.get("class") != "critique":
            self.problems.append("a section has no name")
        if tag == "table":
            self._tables.append(any(one.get("role") == "region" and "aria-label" in one for _, one, _ in self._open))
        if tag == "caption":
            self._tables[-1] = True
        if attributes.get("tabindex", "0") not in ("0", "-1"):
            self.problems.append(f"{tag} changes the order of the keyboard")
        if tag not in VOID:
            self._open.append((tag, attributes, []))

    def handle_data(self, data: str) -> None:
        for _, _, words in self._open:
            words.append(data)

    def handle_endtag(self, tag: str) -> None:
        opened, attributes, words = self._open.pop()
        if opened != tag:
            self.problems.append(f"</{tag}> ends a {opened}")
        if tag in NAMED and not "".join(words).strip() and "aria-label" not in attributes:
            self.problems.append(f"a {tag} has no words")
        if tag == "table" and not self._tables.pop():
            self.problems.append("a table has no name")

    def select(self, attribute: str) -> list[str]:
        return [given[attribute] for _, given in self.found if attribute in given]

    def _headings(self) -> Iterator[str]:
        levels = [int(tag[1]) for tag, _ in self.found if tag in HEADINGS]
        if levels.count(1) != 1 or levels[0] != 1:
            yield f"{levels.count(1)} headings of the page"
        yield from (f"h{b} follows h{a}" for a, b in pairwise(levels) if b > a + 1)

    def _references(self) -> Iterator[str]:
        ids = Counter(self.select("id"))
        yield from (f"id {one} stands {count} times" for one, count in ids.items() if count > 1)
        wanted = [one for text in self.select("aria-labelledby") for one in text.split()]
        wanted += [href[1:] for href in self.select("href") if href.startswith("#")]
        yield from (f"nothing has the id {one}" for one in wanted if one not in ids)

    def _landmarks(self) -> Iterator[str]:
        tags = Counter(tag for tag, _ in self.found)
        if not next(given for tag, given in self.found if tag == "html").get("lang"):
            yield "no language"
        yield from (f"{tags[tag]} {tag}" for tag in ("main", "header") if tags[tag] != 1)
        names = Counter(given.get("aria-label", "") for tag, given in self.found if tag == "nav")
        yield from (f"{count} navigations are named {name!r}" for name, count in names.items() if count > 1 or not name)
        first = next((given.get("href") for tag, given in self.found if tag == "a"), None)
        if first is None or not any(tag == "main" and first == f"#{given.get('id')}" for tag, given in self.found):
            yield "the first link doesn't skip to the content"
        live = [given for _, given in self.found if "aria-live" in given or given.get("role") in ("status", "alert")]
        if any("data-state" not in given for given in live):
            yield "what never changes says that it is live"


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG 2 between two colours, such as #1d2129."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = digits if len(digits) == 6 else "".join(2 * one for one in digits)
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
              for value in (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def colour_schemes(css: str) -> list[dict[str, str]]:
    """The variables of each :root, by name: of the light scheme, then of the dark one."""
    return [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)]
