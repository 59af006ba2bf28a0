"""Prefect's automations hear of refused runs and of a new champion, once, as docs/operations.md says."""

import http.server
import json
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.service import running_service, wait_for

pytestmark = pytest.mark.full
SECONDS = 90.0
# Automations for both kinds; then flow runs that were refused, one of them without our tag, and two verdicts.
TELL = """
import sys, time
from datetime import timedelta
from prefect import flow
from prefect.automations import AutomationCore, CallWebhook, EventTrigger, Posture
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from flows.service.deployments import refusal, tell_champion
from flows.service.deployments import TAG

@flow(name="vlm-sft")
def nothing(): ...

block = Webhook(url=sys.argv[1], headers={"Content-Type": "application/json"}).save("hook")
tagged = {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
kinds = {
    "refused": ("prefect.flow-run.Refused", "prefect.flow-run.*", tagged, "flow_run.name"),
    "champion": ("athanor.champion", "athanor.model.*", {}, "event.payload.message"),
}
with get_client(sync_client=True) as client:
    for kind, (event, resource, related, told) in kinds.items():
        trigger = EventTrigger(
            expect={event}, match={"prefect.resource.id": resource}, match_related=related, posture=Posture.Reactive,
            threshold=1, within=timedelta(0),
        )
        call = CallWebhook(block_document_id=block, payload="{{ {'%s': %s}|tojson }}" % (kind, told))
        client.create_automation(AutomationCore(name=kind, trigger=trigger, actions=[call]))
    time.sleep(5)  # Prefect's trigger service reads new automations
    for name, tags in (("ours", [TAG]), ("another's", [])):
        run = client.create_flow_run(nothing, name=name, tags=tags)
        client.set_flow_run_state(run.id, refusal(ValueError("wrong")), force=True)
tell_champion("digits", "0.5: candidate only", None)
tell_champion("digits", "0.9: champion", None)
time.sleep(2)  # an event is sent by a thread
"""


class _Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_a_refused_run_and_a_new_champion_are_told_once(tmp_path):
    receiver = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    receiver.heard = []
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    with running_service(tmp_path / "root") as service:
        address = f"http://127.0.0.1:{receiver.server_port}"
        subprocess.run([sys.executable, "-c", TELL, address], env=service.env(), check=True)
        wait_for(lambda: len(receiver.heard) >= 2, SECONDS, "two calls")
        time.sleep(5)  # for what should not come
    receiver.shutdown()
    assert sorted(receiver.heard, key=str) == [{"champion": "0.9: champion"}, {"refused": "ours"}]
