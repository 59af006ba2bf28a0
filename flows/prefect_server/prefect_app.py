"""`uvicorn --factory flows.prefect_server.prefect_app:make_app`: Prefect's server, which asks for its own password,
behind the guard."""

from prefect.server.api.server import create_app
from starlette.types import ASGIApp

from flows.prefect_server.guard import guarded


def make_app() -> ASGIApp:
    """Prefect's API and pages, as the environment sets them."""
    return guarded(create_app())
