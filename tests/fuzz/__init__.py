"""Inputs that a seeded fuzzer has damaged."""
