"""Scores of generated answers: one module a metric, their table, and how sure they are."""
