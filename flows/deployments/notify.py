"""Notifications of a service: Prefect automations that call a webhook, Slack or a mail server.

They belong to the service and not to a recipe: the addresses are secrets, and a run is late before a recipe is read.
Prefect's own blocks and actions are used, so that any Prefect server can carry them out.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.automations import AutomationCore, CallWebhook, EventTrigger, Posture, SendNotification
from prefect.blocks.notifications import SlackWebhook
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events import emit_event

from flows.deployments.channels import KINDS, addresses, wanted_kinds

TAG = "athanor"  # of every deployment, and so of its flow runs
_PREFIX = "athanor: "  # of the names of automations
# Values of the templates: a name of the thing, one line about it, and the address of its page.
_OF_RUNS = ("flow_run.name", "flow_run.state.message or ''", "flow_run|ui_url")
_TAGGED = {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
_JSON = {"Content-Type": "application/json"}
_OF_MODELS = ("event.payload.model", "event.payload.message", "event.payload.url")


def set_notifications() -> list[str]:
    """Make the server's automations those of the environment, and return the kinds that are told.

    An automation that somebody has switched off stays off.

    Raises:
        InputError: see `addresses` and `wanted_kinds`.
    """
    channels = addresses()
    kinds = wanted_kinds() if channels else []
    with get_client(sync_client=True) as client:
        blocks = {channel: _save_block(channel, address) for channel, address in channels.items()}
        for kind in KINDS:
            name = f"{_PREFIX}{kind}"
            before = client.read_automations_by_name(name)
            if kind in kinds:
                automation = _automation(name, kind, blocks)
                if before:
                    automation.enabled = before[0].enabled
                    client.update_automation(before[0].id, automation)
                else:
                    client.create_automation(automation)
            for stale in before[kind in kinds :]:
                client.delete_automation(stale.id)
    return kinds


def tell_champion(name: str, verdict: str, url: str | None) -> None:
    """Tell the server that a model became champion, if the verdict says so.

    Args:
        verdict: the decision on the model, see `flows.tracking.registry.decide`.
        url: address of the run's page in MLflow.
    """
    if verdict.endswith(": champion"):
        payload = {"model": name, "message": verdict, "url": url or ""}
        emit_event("athanor.champion", resource={"prefect.resource.id": f"athanor.model.{name}"}, payload=payload)


def _automation(name: str, kind: str, blocks: Mapping[str, UUID]) -> AutomationCore:
    is_of_run = kind != "champion"
    thing, line, url = _OF_RUNS if is_of_run else _OF_MODELS
    text = f"'{kind}: ' ~ ({thing}) ~ ': ' ~ ({line}) ~ ' ' ~ ({url})"
    payloads = {
        "webhook": f"{{{{ {{'kind': '{kind}', 'name': {thing}, 'message': {line}, 'url': {url}}}|tojson }}}}",
        "slack": f"{{{{ {{'text': {text}}}|tojson }}}}",
    }
    actions: list[Any] = [
        SendNotification(block_document_id=block, subject=f"athanor {kind}", body=f"{{{{ {text} }}}}")
        if channel == "email"
        else CallWebhook(block_document_id=block, payload=payloads[channel])
        for channel, block in blocks.items()
    ]
    trigger = EventTrigger(
        expect=set(KINDS[kind]),
        match={"prefect.resource.id": "prefect.flow-run.*" if is_of_run else "athanor.model.*"},
        match_related=_TAGGED if is_of_run else {},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )
    return AutomationCore(name=name, description=f"Tells: {kind}. Made by athanor.", trigger=trigger, actions=actions)


def _save_block(channel: str, address: str) -> UUID:
    """Save the block of a channel, and return its id."""
    # Prefect's block for Slack hands every address that is not Slack's to Apprise, which sends mail.
    block = SlackWebhook(url=address) if channel == "email" else Webhook(url=address, headers=_JSON)
    return block.save(f"athanor-notify-{channel}", overwrite=True)
