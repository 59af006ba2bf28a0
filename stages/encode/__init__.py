"""How a conversation is put to a model; training and answering share it.

In: messages and pictures of a sample. Out: token ids, which of them are learnt, patches.
Read first: `chat.py`, the one place that decides what is trained on.
"""
