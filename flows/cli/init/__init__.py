"""The parts of `athanor init`: the settings that fit the data and the GPU, what is printed, the recipe's text.

In: the trial of a source. Out: a recipe of some forty lines.
Read first: `choice.py`, then `recipe_text.py`.
"""
