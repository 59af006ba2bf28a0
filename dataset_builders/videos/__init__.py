"""Videos: which frames a model reads, at which size and time.
"""
