"""Questions of people to a loaded model: one at a time, or those of many users in one batch.

In: messages, encoded images, a model directory. Out: text, piece by piece while it is generated.
Read first: `conversation.py`, then `batch.py`.
"""
