"""The encoding of a conversation for a model, shared by training and answering.

In: messages and images of a sample. Out: token ids, the loss mask, patches.
Read first: `chat.py`, the only module that decides which tokens are trained on.
"""
