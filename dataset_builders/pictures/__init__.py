"""Images: checked RGB pixels, the patches of a model, and hashes that recognise a copy.

In: the encoded image bytes of a row. Out: RGB pixels, uint8 patches, the codecs of tokenized pixels.
Read first: `images.py` (which images are refused and why), then `pixels.py` (the one conversion to patches).
"""
