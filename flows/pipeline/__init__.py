"""The order of the stages, the recipes that configure them, and what a run holds while it runs.

In: a PipelineConfig. Out: artifacts, scores, a registered model.
Read first: `steps.py` and `plan.py`, then `flow.py` and `tasks.py`.
"""
