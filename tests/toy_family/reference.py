"""transformers' side of the toy family: Qwen3-VL's classes with other layers, and a directory of random weights."""

import copy
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import randomize
from tests.toy_family.family import MODEL_TYPE


class ToyConfig(transformers.Qwen3VLConfig):
    """Qwen3-VL's config with `text_config.rotary_dim`."""

    model_type = MODEL_TYPE


class ToyAttention(qwen3_vl.Qwen3VLTextAttention):
    """Attention that rotates the first `rotary_dim` components of a head. Every other layer has a gate."""

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.g_proj = None
        if layer_idx % 2:
            self.g_proj = torch.nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        turned = cos.size(-1)
        q, k = qwen3_vl.apply_rotary_pos_emb(query[..., :turned], key[..., :turned], cos, sin)
        query, key = torch.cat((q, query[..., turned:]), -1), torch.cat((k, key[..., turned:]), -1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, qwen3_vl.eager_attention_forward
        )
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        out = out.reshape(*hidden_states.shape[:-1], -1)
        if self.g_proj is not None:
            out = out * self.g_proj(hidden_states).sigmoid()
        return self.o_proj(out), weights


class ToyBlend(torch.nn.Module):
    """The matrices of all MLPs, one tensor for each kind."""

    def __init__(self, config) -> None:
        super().__init__()
        count, width, inner = config.num_blended, config.hidden_size, config.intermediate_size
        self.gate_proj = torch.nn.Parameter(torch.zeros(count, inner, width))
        self.up_proj = torch.nn.Parameter(torch.zeros(count, inner, width))
        self.down_proj = torch.nn.Parameter(torch.zeros(count, width, inner))


class ToyFeedForward(torch.nn.Module):
    """MLPs whose outputs are weighted by a softmax of the token."""

    def __init__(self, config) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(config.hidden_size, config.num_blended, bias=False)
        self.blend = ToyBlend(config)

    def forward(self, hidden):
        out, weights = torch.zeros_like(hidden), self.gate(hidden).softmax(-1)
        for number, matrices in enumerate(zip(self.blend.gate_proj, self.blend.up_proj, self.blend.down_proj)):
            gate, up, down = matrices
            inner = F.silu(hidden @ gate.t()) * (hidden @ up.t())
            out = out + weights[..., number : number + 1] * (inner @ down.t())
        return out


class ToyForConditionalGeneration(transformers.Qwen3VLForConditionalGeneration):
    """The whole model."""

    config_class = ToyConfig

    def __init__(self, config) -> None:
        super().__init__(config)
        text = self.model.language_model
        for number, layer in enumerate(text.layers):
            layer.self_attn = ToyAttention(text.config, number)
            if number % 2 == 0:
                layer.mlp = ToyFeedForward(text.config)
        narrow = copy.deepcopy(text.config)
        narrow.head_dim = narrow.rotary_dim
        text.rotary_emb = qwen3_vl.Qwen3VLTextRotaryEmbedding(narrow)
        self.post_init()


transformers.AutoConfig.register(MODEL_TYPE, ToyConfig, exist_ok=True)


def write_toy(directory: Path) -> Path:
    """Write a complete directory of the toy model, none of whose tensors has a special value."""
    shutil.copytree(tiny_hf_dir(), directory)
    config = json.loads((directory / "config.json").read_text())
    config["model_type"] = MODEL_TYPE
    config["vision_config"]["deepstack_visual_indexes"] = []
    config["text_config"] |= {"rotary_dim": 8, "num_blended": 3}
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    model = ToyForConditionalGeneration(ToyConfig(**config))
    randomize(model)
    model.generation_config = transformers.GenerationConfig.from_pretrained(tiny_hf_dir())
    model.save_pretrained(directory)
    return directory
