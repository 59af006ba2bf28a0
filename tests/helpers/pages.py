"""A page as a browser parses it: elements, attributes and text, to check for required and forbidden content."""

import base64
import hashlib
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "img", "input", "br", "link"}


@dataclass(eq=False, repr=False)
class Element:
    """An element with everything inside it."""

    tag: str
    attributes: dict[str, str | None]
    parents: tuple["Element", ...]
    pieces: list[str] = field(default_factory=list)
    inside: list["Element"] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return all text inside the element, unescaped."""
        return "".join(self.pieces)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def find(self, tag: str = "", css: str = "") -> list["Element"]:
        """Return the elements below this one with this tag and this class, in order."""
        return [e for e in self.inside if tag in ("", e.tag) and (not css or css in e.classes)]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {}, ())
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), tuple(self.open))
        for parent in self.open:
            parent.inside.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element.pieces.append(data)


def parse_page(page: str) -> Element:
    """Parse a page, and assert that every element is closed in the right order."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    assert len(parser.open) == 1, f"not closed: {[e.tag for e in parser.open[1:]]}"
    return parser.root


def image_bytes(image: Element) -> bytes:
    """Return the bytes of an <img> with a data URI."""
    return base64.b64decode(image.attributes["src"].partition(";base64,")[2])


def assert_images_told(page: str) -> None:
    """Assert that the page has images, and that each of them says in words what it shows."""
    images = parse_page(page).find("img")
    silent = [image.attributes.get("alt") for image in images if not (image.attributes.get("alt") or "").strip()]
    assert images and not silent, f"{len(silent)} of {len(images)} images have no text"


def assert_self_contained(page: str) -> None:
    """Assert that the page loads nothing, and that no script can run except its own, on a page of samples."""
    root = parse_page(page)
    for element in root.inside:
        for name, value in element.attributes.items():
            value = value or ""
            assert not name.startswith("on"), f"<{element.tag} {name}>"
            if name == "src":
                assert value.startswith("data:image/"), value[:80]
            if name.endswith("href"):
                assert not re.match(r"[a-z]+:|//", value.strip().lower()), value[:80]
            if name == "style":
                assert "url(" not in value
        assert element.tag not in ("link", "iframe", "object", "embed", "base", "form"), element.tag
    for style in root.find("style"):
        assert not re.search(r"url\(|@import", style.text)
    (policy,) = [m.attributes["content"] for m in root.find("meta") if "http-equiv" in m.attributes]
    scripts = [base64.b64encode(hashlib.sha256(s.text.encode()).digest()).decode() for s in root.find("script")]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; ")
    assert re.findall(r"script-src ([^;]*);", policy) == [f"'sha256-{digest}'" for digest in scripts]
    assert len(scripts) == bool(root.find("nav"))
