"""The flows that a service offers, and the limits of what a request may ask for.

In: the name of a recipe and the settings that differ from it. Out: a flow run, or one line that says what to fix.
Read first: `offers.py`, then `flows.py`.
"""
