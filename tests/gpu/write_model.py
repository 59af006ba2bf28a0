"""Write a complete HF directory with published sizes and random weights in seconds: python -m tests.gpu.write_model
qwen3_vl_4b DIRECTORY.

The tokenizer is a small one, trained on a few words. The embedding has all its rows.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from dataset_builders.storage.files import write_json
from stages.embedded_model.stage import make_tiny_hf_dir
from stages.shared.inputs.config import EmbeddedModelConfig
from tests.helpers.large_model import write_large_model
from trainer.model.registry import get_variant

TEXTS = ["What does the chart show?", "Which tree is taller?", "Answer with one word: red, green, blue or 1984."] * 20


def write_model(variant: str, directory: Path) -> int:
    """Write the directory, and return the number of parameters."""
    family, _ = get_variant(variant)
    large = EmbeddedModelConfig(variant=variant, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_hf_dir(
            Path(folder), EmbeddedModelConfig(family=family, seed=0, vocab_size=large.vocab_size), TEXTS
        )
        ids = _control_ids(tiny)
        configs = large.hf_configs(ids)
        parameters = write_large_model(directory, configs["config.json"])
        write_json(directory / "preprocessor_config.json", configs["preprocessor_config.json"])
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(tiny / name, directory / name)
    return parameters


def _control_ids(hf_dir: Path) -> dict[str, int]:
    """Return the id of each added token."""
    added = json.loads((hf_dir / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return {token["content"]: token["id"] for token in added}


if __name__ == "__main__":
    print(f"{write_model(sys.argv[1], Path(sys.argv[2])):,} parameters")
