"""MLflow makes the tables of a new SQLite file by about fifty migrations. These tests do that only once per process."""

import sqlite3
from contextlib import closing

import flows.tracking  # noqa: F401  sets what MLflow reads at its import

# isort: split
import mlflow.store.db.utils
import mlflow.store.model_registry.sqlalchemy_store
import pytest
import sqlalchemy


@pytest.fixture(autouse=True, scope="session")
def tables_made_once(tmp_path_factory):
    """Give each new SQLite file of this process a copy of the first file's empty tables."""
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
