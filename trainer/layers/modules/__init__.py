"""The sets of modules on CUDA, and the choice between them.

In: a job's settings and its device. Out: a set, from which module_set.py builds layers.
Read first: `choice.py`.
"""
