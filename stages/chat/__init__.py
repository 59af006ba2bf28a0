"""Questions of a person to an exported model, answered as the evaluation answers them.

In: messages, image files, a model directory. Out: the answer's text.
Read first: `ask.py`.
"""
