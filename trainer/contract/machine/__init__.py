"""What a host has to train with, and which modules follow from it. Loads no torch.

In: a Host, and the settings that ask for modules. Out: the name of the set, a line that says so, or a refusal.
Read first: `modules.py`.
"""
