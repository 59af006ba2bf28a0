"""The programs that athanor starts send no usage data to MLflow's or Prefect's makers, and their
pages show it as off."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import mlflow.server
import pytest
from mlflow.telemetry import utils
from prefect._internal.analytics.enabled import is_telemetry_enabled
from prefect.settings.models.root import Settings

import flows
from flows.service import mlflow_app
from flows.service.programs import service_environment

pytestmark = pytest.mark.promise("The pages of the service ask no other server, and telemetry is switched off.")

WORDS = ("telemetry", "analytics", "metrics")


def switches(settings: Mapping[str, object], path: str = "") -> Iterator[tuple[str, bool]]:
    """Return Prefect's telemetry settings by dotted name, as its settings page lists them."""
    for name, value in settings.items():
        dotted = f"{path}.{name}"
        if isinstance(value, Mapping):
            yield from switches(value, dotted)
        elif isinstance(value, bool) and any(word in dotted for word in WORDS):
            yield dotted.removeprefix("."), value


@pytest.mark.parametrize("part", ["command line", "service"])
def test_every_switch_for_telemetry_is_off(part, tmp_path, monkeypatch):
    environment = flows.NO_TELEMETRY if part == "command line" else service_environment(tmp_path)
    for name in ("_IS_IN_CI_ENV_OR_TESTING", "_IS_MLFLOW_DEV_VERSION"):
        monkeypatch.setattr(utils, name, False)
    monkeypatch.setattr("prefect._internal.analytics.enabled.is_ci_environment", lambda: False)
    with patch.dict(os.environ, environment, clear=True):
        found = dict(switches(Settings().model_dump()))
        assert {"server.analytics_enabled", "cloud.enable_orchestration_telemetry"} <= found.keys()
        assert [name for name, is_on in found.items() if is_on and not name.startswith("server.metrics")] == []
        assert utils.is_telemetry_disabled() and not is_telemetry_enabled()
    with patch.dict(os.environ, {}, clear=True):
        assert not utils.is_telemetry_disabled() and is_telemetry_enabled(), "otherwise this test would show nothing"


def test_a_command_of_ours_sets_them_before_a_library_is_loaded():
    assert flows.NO_TELEMETRY.items() <= os.environ.items()


def test_mlflows_page_finds_its_own_switch_off():
    """The switch is a versioned key of the browser's storage. Key and version may change with a new MLflow."""
    (main,) = Path(mlflow.server.__file__).parent.glob("js/build/static/js/main.*.js")
    script = main.read_text(encoding="utf-8")
    enabled, dismissed = "mlflow.settings.telemetry.enabled", "mlflow.telemetry.info.alert.dismissed"
    found = re.search(rf'const o=(\d+),i="{re.escape(enabled)}",a="{re.escape(dismissed)}",s=(\d+)', script)
    assert found is not None, "the page names its switch otherwise now"
    assert f'"{enabled}_v{found[1]}": "false"' in mlflow_app._FIRST_VISIT
    assert f'"{dismissed}_v{found[2]}": "true"' in mlflow_app._FIRST_VISIT
