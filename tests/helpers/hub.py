"""A hub with one dataset on this machine: the part of the Hugging Face API that a snapshot download needs."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "c" * 40


@contextlib.contextmanager
def hub_server(name: str, directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the directory as the hub dataset `name`. Yield the hub's address and the files that were fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlparse(self.path).path)
            file = path.removeprefix(f"/datasets/{name}/resolve/{COMMIT}/")
            if path == f"/api/datasets/{name}/revision/main":
                self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode(), {})
            elif path in (f"/api/datasets/{name}/tree/{COMMIT}", f"/api/datasets/{name}/tree/main"):
                files = [f for f in sorted(directory.rglob("*")) if f.is_file()]
                self._send(json.dumps([_entry(f, directory) for f in files]).encode(), {})
            elif file != path and (directory / file).is_file():
                data = (directory / file).read_bytes()
                fetched.extend([file] if with_body else [])
                self._send(data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT}, with_body)
            else:
                self._send(b"", {"X-Error-Code": "RepoNotFound"}, status=404)

        def _send(self, data: bytes, headers: dict[str, str], with_body: bool = True, status: int = 200) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    finally:
        server.shutdown()
        server.server_close()


def _entry(file: Path, directory: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {"type": "file", "path": file.relative_to(directory).as_posix(), "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
