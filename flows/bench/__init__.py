"""`athanor bench`: lmms-eval's tasks before and after training. `athanor rate`: the speed of this machine.

In: a model, of a finished run or by itself. Out: scores with intervals in the run, its gates and its report; a card.
Read first: `bench.py`.
"""
