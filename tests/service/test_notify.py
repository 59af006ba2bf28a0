"""Notifications of a service arrive at a webhook, at Slack's and by mail: each kind once, and of tagged runs only."""

import http.server
import json
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from flows.deployments.channels import KINDS
from tests.helpers.service import running_service, wait_for

pytestmark = pytest.mark.full
SECONDS = 90.0
# Flow runs in the states that Prefect's events are about, one of them without our tag, and a new champion.
TELL = """
import time
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Failed, Scheduled
from flows.deployments.notify import tell_champion

@flow(name="vlm-sft")
def nothing(): ...

states = {"failed": Failed(message='said "no"'), "refused": Failed(name="Refused"), "late": Scheduled(name="Late")}
with get_client(sync_client=True) as client:
    for tags in (["athanor"], []):
        for name, state in states.items():
            run = client.create_flow_run(nothing, name=f"a {name} run", tags=tags)
            client.set_flow_run_state(run.id, state, force=True)
tell_champion("digits", "0.5: candidate only", None)
tell_champion("digits", "0.9: champion", None)
time.sleep(2)  # an event is sent by a thread
"""


class _Web(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class _Mail(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Take one message, as a mail server does."""
        self.wfile.write(b"220 test\r\n")
        while line := self.rfile.readline().decode().strip().upper():
            self.wfile.write(b"354 go\r\n" if line == "DATA" else b"250 test\r\n")
            if line == "DATA":
                lines = list(iter(lambda: self.rfile.readline().decode().strip(), "."))
                self.server.heard.append(next(text for text in lines if text.startswith("Subject:")))
                self.wfile.write(b"250 taken\r\n")
            if line == "QUIT":
                return


@pytest.fixture
def receivers() -> Iterator[tuple[socketserver.TCPServer, socketserver.TCPServer]]:
    web, mail = (
        kind(("127.0.0.1", 0), handler)
        for kind, handler in ((http.server.ThreadingHTTPServer, _Web), (socketserver.ThreadingTCPServer, _Mail))
    )
    for server in (web, mail):
        server.heard = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield web, mail
    web.shutdown()
    mail.shutdown()


def test_each_kind_arrives_once_on_each_way(tmp_path, receivers):
    web, mail = receivers
    place, mail_port = f"http://127.0.0.1:{web.server_port}", mail.server_address[1]
    environment = {
        "ATHANOR_NOTIFY_WEBHOOK": f"{place}/hook",
        "ATHANOR_NOTIFY_SLACK": f"{place}/slack",
        "ATHANOR_NOTIFY_EMAIL": f"mailto://127.0.0.1:{mail_port}?from=a@example.org&to=b@example.org",
    }
    with running_service(tmp_path / "root", environment=environment) as service:
        subprocess.run([sys.executable, "-c", TELL], env=service.env(), check=True)
        wait_for(lambda: len(web.heard) >= 8 and len(mail.heard) >= 4, SECONDS, "eight calls and four mails")
        time.sleep(5)  # for what should not come
    hooks = {body["kind"]: body for path, body in web.heard if path == "/hook"}
    assert sorted(hooks) == sorted(KINDS) and len(web.heard) == 8
    assert hooks["failed"]["message"] == 'said "no"' and "/runs/flow-run/" in hooks["failed"]["url"]
    assert (hooks["champion"]["name"], hooks["champion"]["message"]) == ("digits", "0.9: champion")
    texts = [body["text"] for path, body in web.heard if path == "/slack"]
    assert sorted(text.partition(":")[0] for text in texts) == sorted(KINDS)
    assert sorted(mail.heard) == [f"Subject: athanor {kind}" for kind in sorted(KINDS)]
