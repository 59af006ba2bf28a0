"""Pixels against transformers' torchvision processor itself (full tier; the core compares its recorded digests,
tests/stages/shared/chat_format/test_encode_image.py).

`make test-full` installs torchvision beside the environment, into .venv/torchvision, and not into it: the project does
not need it, and other tests show what a user without it meets.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(
    "Pixels have the bits of the Hugging Face processor, for over 100 images of 8 modes: in the core by "
    "recorded digests."
)

ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.prefix) / "torchvision"


@pytest.mark.full
def test_bit_equal_to_the_reference_itself():
    if not BESIDE.is_dir() and importlib.util.find_spec("torchvision") is None:
        pytest.fail(f"{BESIDE} is missing; `make .venv/torchvision` installs it", pytrace=False)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, BESIDE)))}
    command = [sys.executable, "-m", "tests.parity.compare_pixels"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pattern = r"torchvision (\S+): (\d+) pictures equal, (\d+) changed .*; (\d+) videos equal, (\d+) changed"
    version, pictures, bits, videos, bits_of_videos = re.search(pattern, done.stdout).groups()
    assert version.startswith("0.") and int(pictures) >= 124 and int(bits) >= 4
    assert int(videos) == int(bits_of_videos) >= 40
