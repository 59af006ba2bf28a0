"""The order of the stages, and the recipes that configure them.

In: a PipelineConfig. Out: artifacts, scores, a registered model.
Read first: `steps.py` and `plan.py`, then `flow.py`.
"""
