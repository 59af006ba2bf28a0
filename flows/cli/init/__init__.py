"""The parts of `athanor init`: settings that fit the data and the GPU, the printed lines, the text of the recipe.

In: the trial of a source. Out: a recipe of some forty lines.
Read first: `choice.py`, then `recipe_text.py`.
"""
