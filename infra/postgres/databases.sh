#!/bin/bash
# Postgres runs this script once, on an empty data directory. It makes a database and a user each for Prefect and for
# MLflow, and one more database for MLflow's users. Only the owner of a database may connect to it.
set -euo pipefail

psql --set=ON_ERROR_STOP=1 --no-psqlrc --quiet --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
\getenv prefect_password PREFECT_DB_PASSWORD
\getenv mlflow_password MLFLOW_DB_PASSWORD
CREATE ROLE prefect LOGIN PASSWORD :'prefect_password';
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow_password';
CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE ALL ON DATABASE prefect, mlflow, mlflow_auth FROM PUBLIC;
SQL
