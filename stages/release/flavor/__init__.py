"""MLflow's flavor of a released directory: the files that make it a model of `mlflow.pyfunc`.

In: an HF directory. Out: MLmodel, mlflow_model.py, requirements.txt and an input example, beside its files.
Read first: `mlmodel.py`, then `mlflow_model.py`, which is copied and not imported.
"""
