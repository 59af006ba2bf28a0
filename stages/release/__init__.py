"""The release of an exported model: its model card, and the push to a hub.

In: the export, its training, data and scores. Out: an HF directory with README.md.
Read first: `stage.py`, then `model_card.py`.
"""
