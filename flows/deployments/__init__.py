"""The flows that a service offers, and what a request may ask of them.

In: a recipe's name and what differs from it. Out: a flow run, or one line that says what to mend.
Read first: `offers.py`, then `flows.py`.
"""
