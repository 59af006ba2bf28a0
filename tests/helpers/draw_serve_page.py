"""The picture of the page of `athanor serve` in docs/serve.md.

python -m tests.helpers.draw_serve_page MODEL MODEL2 --image 1.png --image 2.png --question "Which is larger?"
"""

import argparse
import tempfile
from pathlib import Path

from tests.helpers.browser import chromium
from tests.helpers.serving import serving

PICTURE = Path(__file__).parents[2] / "docs/pictures/serve_page.png"


def main() -> None:
    """Ask both models, vote for the second, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path, nargs=2)
    parser.add_argument("--image", type=Path, action="append", default=[])
    parser.add_argument("--question", required=True)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(args.models, Path(directory, "root")) as server,
        chromium() as browser,
    ):
        credentials = {"username": "athanor", "password": server.key}
        context = browser.new_context(http_credentials=credentials, viewport={"width": 1440, "height": 620})
        page = context.new_page()
        page.goto(server.url)
        page.set_input_files("#file", args.image)
        page.locator("#question").fill(args.question)
        page.keyboard.press("Enter")
        page.get_by_text("Which answer is better?").wait_for()
        page.keyboard.press("2")
        page.get_by_text("Vote stored").wait_for()
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
