"""The parts of a layer, one folder each, and the vision encoder.

In: the sizes of a part. Out: `part.py`, what is known of the part without torch, and `module.py`, what computes it.
Read first: `trainer/model/layer.py`, then `attention/part.py` and `attention/module.py`.
"""
