"""Fixtures that keep tests from the developer's servers, replace the training by a stand-in and make MLflow's tables
once."""

import logging
import sqlite3
from contextlib import closing

import pytest

from tests.helpers.small_run import SmallRun, made_once, stand_in_trainer


@pytest.fixture(autouse=True)
def quick_and_apart():
    """Apply to every test."""
    handlers = list(logging.getLogger().handlers)
    with stand_in_trainer():
        yield
    logging.getLogger().handlers[:] = handlers  # a command adds its own


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> SmallRun:
    """One finished run for all tests of all processes of the session."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if own.name.startswith("popen-") else own) / "small-run"
    directory.mkdir(exist_ok=True)
    return made_once(directory)


@pytest.fixture(autouse=True, scope="session")
def tables_made_once(tmp_path_factory):
    """Give each new SQLite file of this process a copy of the first file's empty tables: MLflow makes them by about
    fifty migrations, in more than a second."""
    import flows.tracking  # noqa: F401  sets what MLflow reads at its import

    # isort: split
    import mlflow.store.db.utils
    import mlflow.store.model_registry.sqlalchemy_store
    import sqlalchemy

    make, template = mlflow.store.db.utils._initialize_tables, tmp_path_factory.mktemp("tables") / "mlflow.db"

    def copy(engine: sqlalchemy.Engine) -> None:
        if engine.dialect.name != "sqlite" or not engine.url.database:
            return make(engine)
        if not template.exists():
            made = sqlalchemy.create_engine(f"sqlite:///{template}")
            make(made)
            made.dispose()
        with closing(sqlite3.connect(template)) as source, closing(sqlite3.connect(engine.url.database)) as target:
            source.backup(target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow.store.db.utils, "_initialize_tables", copy)
        patch.setattr(mlflow.store.model_registry.sqlalchemy_store, "_initialize_tables", copy)
        yield
