"""Deliberate breaks of the code, each a small patch, and the command that shows that the core tests detect them.

In: `*.patch`; the lines before a patch's first `diff` say what it breaks, and which tests to try first.
Read first: `__main__.py`.
"""
