"""One process a GPU, started by torchrun with one JSON file. Knows no Prefect and no MLflow."""
