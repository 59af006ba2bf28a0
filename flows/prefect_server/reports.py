"""The pages of a root's artifacts over HTTP, so that links of Prefect's and MLflow's pages open them in a browser.

/reports/<stage>/<fingerprint>/report.html      the file of that name in the artifact's directory
"""

import re
from pathlib import Path

from starlette.responses import FileResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dataset_builders.storage.store import StorePath, absolute, is_local
from flows.prefect_server.service_record import read_record

_PAGE = re.compile(r"/reports/(?P<place>[a-z0-9_]+/[0-9a-f]{16})/(?P<name>[a-z_]+\.html)")
# A page shows texts of raw data. So it may run its own scripts, but has no origin and calls no server.
_HEADERS = {"Content-Security-Policy": "sandbox allow-scripts; connect-src 'none'"}


def with_reports(app: ASGIApp, root: Path) -> ASGIApp:
    """Return an application that also serves the pages at the top of the artifacts' directories, and no other file."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/reports/"):
            await app(scope, receive, send)
            return
        match = _PAGE.fullmatch(scope["path"])
        path = root / "artifacts" / match["place"] / match["name"] if match else None
        if path is None or not path.is_file():
            await PlainTextResponse("there is no such page\n", 404)(scope, receive, send)
        else:
            await FileResponse(path, headers=_HEADERS)(scope, receive, send)

    return answer


def page_url(root: StorePath, page: StorePath) -> str | None:
    """Return the address of an artifact's page on the root's running service; None if no service serves it."""
    service = read_record(root)
    if service is None or not is_local(root) or not str(page).startswith(f"{absolute(root)}/artifacts/"):
        return None
    return f"{service.mlflow}/reports/{str(page).removeprefix(f'{absolute(root)}/artifacts/')}"
