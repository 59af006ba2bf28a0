"""The parts of a layer, one folder each, and the vision encoder.

In: the sizes of a part. Out: `part.py`, the description of the part without torch, and `module.py`, its computation.
Read first: `trainer/model/layer.py`, then `attention/part.py` and `attention/module.py`.
"""
