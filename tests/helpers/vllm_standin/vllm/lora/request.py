import json
from pathlib import Path


class LoRARequest:
    """lora/request.py, with what lora/peft_helper.py and lora/lora_model.py refuse when the adapter is first used."""

    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str = "") -> None:
        if lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {lora_int_id}")
        assert lora_path, "lora_path cannot be empty"
        config = json.loads((Path(lora_path) / "adapter_config.json").read_text())
        if config.get("use_dora"):
            raise ValueError("vLLM does not yet support DoRA.")
        if config.get("modules_to_save"):
            raise ValueError("vLLM only supports modules_to_save being None.")
        self.lora_path = lora_path
