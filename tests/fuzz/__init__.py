"""Inputs spoilt by a seeded fuzzer."""
