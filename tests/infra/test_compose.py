"""compose.yaml: it fits the compose schema, and a first start is neither open to the network nor
has known passwords."""

import subprocess
import sys

import pytest
import yaml

from tests.helpers.compose_file import INFRA, load_compose, read_env_file, variables_of

pytestmark = pytest.mark.promise(
    "compose.yaml and Dockerfiles pass their checks; MLflow starts as compose.yaml says, and `athanor sync` "
    "sends a run there whole."
)

COMPOSE = INFRA / "compose.yaml"
NEEDED = [name for name, (_, is_active) in read_env_file(INFRA / "env.example").items() if is_active]
VALUES = {name: f"value-of-{name.lower()}" for name in NEEDED}
SECRET = ("PASSWORD", "SECRET", "TOKEN", "AUTH_STRING", "ACCESS_KEY")


def _services(values=VALUES) -> dict[str, dict]:
    return load_compose("compose.yaml", values)["services"]


def _validate(path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_schema(name, tmp_path):
    assert _validate(INFRA / name).returncode == 0
    wrong = tmp_path / name
    wrong.write_text((INFRA / name).read_text().replace("shm_size:", "shm_siez:"))
    assert "shm_siez" in _validate(wrong).stdout


def test_it_starts_only_with_every_password_and_needs_nothing_else():
    text = COMPOSE.read_text()
    assert {name for name, kind in variables_of(text).items() if kind == "?"} == set(NEEDED)
    assert not [name for name, kind in variables_of(text).items() if not kind]
    for name in NEEDED:
        with pytest.raises(KeyError, match=name):
            _services({**VALUES, name: ""})


def test_no_password_is_in_the_file():
    made_up = set(VALUES.values())
    for name, service in _services().items():
        for variable, value in service.get("environment", {}).items():
            is_secret = any(part in variable for part in SECRET) and variable != "MLFLOW_AUTH_CONFIG_PATH"
            assert not is_secret or value in made_up | {""}, f"{name}: {variable}={value}"
    active = [value for value, is_active in read_env_file(INFRA / "env.example").values() if is_active]
    assert active == [""] * len(NEEDED)


def test_ports_are_on_loopback_unless_told_otherwise():
    ports = [port for service in _services().values() for port in service.get("ports", [])]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    opened = [port for s in _services({**VALUES, "BIND": "10.0.0.1"}).values() for port in s.get("ports", [])]
    assert all(port.startswith("10.0.0.1:") for port in opened)
    assert not any("ports" in _services()[name] for name in ("postgres", "worker"))
    assert not any("network_mode" in service or service.get("privileged") for service in _services().values())


def test_who_is_waited_for_says_when_it_is_ready():
    services = _services()
    waits = [(name, other, how) for name, s in services.items() for other, how in s.get("depends_on", {}).items()]
    assert len(waits) == 6
    for name, other, how in waits:
        if how["condition"] == "service_completed_successfully":
            assert services[other]["restart"] == "no"
        else:
            assert how == {"condition": "service_healthy"}, f"{name} waits for {other} {how}"
            assert services[other]["healthcheck"]["test"][0] == "CMD"
    endless = [name for name, service in services.items() if service.get("restart") == "unless-stopped"]
    assert set(services) - set(endless) == {"buckets"} and all("healthcheck" in services[name] for name in endless)


def test_images_are_pinned_and_volumes_named():
    compose = load_compose("compose.yaml", VALUES)
    for name, service in compose["services"].items():
        _, _, tag = service["image"].rpartition(":")
        assert tag and tag != "latest" and any(c.isdigit() for c in tag), f"{name}: {service['image']}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (INFRA / source).exists(), f"{name}: {volume}"
    stores = {s["volumes"][0].split(":")[0] for n, s in compose["services"].items() if n in ("postgres", "s3")}
    assert stores == {"postgres", "s3"}


def test_no_telemetry_no_pickle_and_authentication():
    services = _services()
    for name in ("prefect", "mlflow", "worker"):
        assert services[name]["environment"]["DO_NOT_TRACK"] == "true"
        assert services[name]["environment"]["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    mlflow = services["mlflow"]
    assert mlflow["environment"]["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"
    assert mlflow["command"][mlflow["command"].index("--app-name") + 1] == "basic-auth"
    server, worker = (services[name]["environment"] for name in ("prefect", "worker"))
    assert server["PREFECT_SERVER_API_AUTH_STRING"] == worker["PREFECT_API_AUTH_STRING"] == VALUES["PREFECT_AUTH"]


def test_gpus_are_added_to_the_worker_alone():
    gpu = load_compose("compose.gpu.yaml", VALUES)["services"]
    assert set(gpu) == {"worker"} and gpu["worker"]["build"]["dockerfile"] == "infra/Dockerfile.train"
    assert yaml.safe_load(COMPOSE.read_text())["services"]["worker"]["build"]["context"] == ".."
