"""Turn somebody's dataset into Samples. CPU only, knows no tokens, no Prefect, no MLflow."""
