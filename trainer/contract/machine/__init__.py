"""The choice of layer modules for a host, by its GPU and its installed libraries. Loads no torch.

In: a Host, and the settings that ask for modules. Out: the name of the module set, a line that reports it, or an error.
Read first: `modules.py`.
"""
