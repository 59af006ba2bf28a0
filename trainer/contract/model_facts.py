"""What of a model's config.json decides its size and how it can be shared: a few numbers, without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset_builders.contracts.errors import InputError

# Loss tokens whose logits exist at a time; trainer/models/output_loss.py says why so many.
LOSS_CHUNK = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A Qwen3-VL in numbers. Names without a prefix are the language model's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    vision_depth: int
    vision_hidden_size: int
    vision_num_heads: int
    vision_intermediate_size: int
    num_positions: int
    patch_size: int
    num_deepstack: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], path: Path | str = "config.json") -> "ModelFacts":
        """From the parsed config.json of an HF directory whose model_type is qwen3_vl.

        Args:
            path: of the file, for what is said of it.

        Raises:
            InputError: a field is missing, or the deepstack levels leave no layer after them.
        """
        try:
            text, vision = config["text_config"], config["vision_config"]
            facts = cls(
                vocab_size=text["vocab_size"],
                hidden_size=text["hidden_size"],
                intermediate_size=text["intermediate_size"],
                num_layers=text["num_hidden_layers"],
                num_heads=text["num_attention_heads"],
                num_kv_heads=text["num_key_value_heads"],
                head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
                tie_word_embeddings=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
                vision_depth=vision["depth"],
                vision_hidden_size=vision["hidden_size"],
                vision_num_heads=vision["num_heads"],
                vision_intermediate_size=vision["intermediate_size"],
                num_positions=vision["num_position_embeddings"],
                patch_size=vision["patch_size"],
                num_deepstack=len(vision["deepstack_visual_indexes"]),
            )
        except KeyError as error:
            raise InputError(f"{path}: the field {error} is missing; is it a complete qwen3_vl config?") from error
        if facts.num_deepstack >= facts.num_layers:
            # The last layer goes on with the loss tokens alone: no feature of image tokens can come after it.
            raise InputError(
                f"{path}: {facts.num_deepstack} deepstack levels (vision_config.deepstack_visual_indexes) need "
                f"more layers than text_config.num_hidden_layers={facts.num_layers}; take a complete qwen3_vl model"
            )
        return facts


def read_facts(hf_dir: Path) -> ModelFacts | None:
    """The facts of an HF directory; None for another model_type, which the registry of models refuses by its name.

    Raises:
        InputError: no config.json there, or a field of it is missing.
    """
    path = hf_dir / "config.json"
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the HF directory of a model")
    config = json.loads(path.read_text(encoding="utf-8"))
    return ModelFacts.from_hf(config, path) if config.get("model_type") == "qwen3_vl" else None
