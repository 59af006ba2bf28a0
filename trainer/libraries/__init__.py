"""The private parts of torch and megatron-core that the trainer uses: a file for each library.

In: the version of the library. Out: the functions and classes with which the trainer calls or replaces its private
parts. Those of Transformer Engine are in `trainer/layers/modules/engine.py`.
Read first: `megatron_private.py`.
"""
