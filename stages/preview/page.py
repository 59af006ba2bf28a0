"""The page of a preview: one file that loads nothing and runs only its own script."""

import base64
import hashlib

from markupsafe import Markup

from stages.pages.page import TEMPLATES, render

_SCRIPT = (TEMPLATES / "preview.js").read_text(encoding="utf-8")
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()


def preview_page(title: str, heading: str, about: str, content: Markup, **of_artifact: object) -> str:
    """Return the whole page.

    Args:
        title, heading, about: plain text; `about` is next to the heading.
        content: the part that depends on the artifact's kind.
        of_artifact: the values of `about_artifact`; none for a shard without an artifact.
    """
    values = {"manifest": None, "tiles": None, **of_artifact}
    script = {"script": Markup(_SCRIPT), "script_hash": Markup(_SCRIPT_HASH)}
    return render("preview.html.j2", title=title, heading=heading, about=about, content=content, **script, **values)
