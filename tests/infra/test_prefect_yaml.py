"""prefect.yaml has the same deployments that flows/service/deployments.py registers."""

import yaml

from flows.service.deployments import OFFERS, POOL, make_deployment
from tests.helpers.compose_file import INFRA


def _as_registered() -> dict[str, dict]:
    found = {}
    for offer in OFFERS:
        made = make_deployment(offer, POOL)
        facts = {
            "entrypoint": made.entrypoint,
            "tags": made.tags,
            "enforce_parameter_schema": made.enforce_parameter_schema,
            "work_pool": {"name": made.work_pool_name},
        }
        if made.concurrency_limit is not None:
            options = made.concurrency_options
            facts["concurrency_limit"] = {
                "limit": made.concurrency_limit,
                "collision_strategy": options.collision_strategy.value,
            }
        if made.schedules:
            facts["schedules"] = [
                {"cron": s.schedule.cron, "timezone": s.schedule.timezone, "active": s.active, "slug": s.slug}
                for s in made.schedules
            ]
        found[offer.name] = facts
    return found


def test_the_same_deployments():
    project = yaml.safe_load((INFRA / "prefect.yaml").read_text())
    assert project["pull"] == []  # without it, Prefect has the worker change into the directory of whoever deployed
    written = {d.pop("name"): d for d in project["deployments"]}
    described = {name: facts.pop("description") for name, facts in written.items()}
    assert all(described.values())
    assert written == _as_registered()


def test_a_request_holds_no_root():
    for offer in OFFERS:
        assert "root" not in make_deployment(offer, POOL)._parameter_openapi_schema.properties
