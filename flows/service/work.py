"""`python -m flows.service.work worker start ...`: Prefect's command line, with the flows loaded.

A worker looks into the flow of a run that is cancelled or crashes, for hooks, before it settles the run's state. Loaded
beforehand that takes no time; otherwise a person who cancels waits for torch, transformers and MLflow to load.
"""

import sys

from prefect.cli import app

from flows.compare import compare_request
from flows.deployed import evaluate_request, prepare_data_request, vlm_sft_request

LOADED = (vlm_sft_request, prepare_data_request, evaluate_request, compare_request)

if __name__ == "__main__":
    sys.exit(app())
