"""A Python of its own that has the stand-in for vLLM, or something else in its place."""

import sys
from pathlib import Path

STANDIN = Path(__file__).parent / "vllm_standin"


def standin_python(directory: Path, site: Path = STANDIN) -> Path:
    """Write a program that is this Python with the packages of another directory before its own; return its path."""
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program
