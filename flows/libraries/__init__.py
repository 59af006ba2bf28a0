"""The private parts of Prefect and MLflow that the flows use: a file for each library.

In: the version of the library. Out: the functions with which the flows call or replace its private parts.
Read first: `prefect_private.py`.
"""
