"""The keys of config.json: each key is understood, or refused by name; a missing key has transformers' default.

A family has one class per object of its config.json, whose fields are the keys. A key that is not a field is refused,
because it may mean something that we do not compute. A field of type Any affects no result of training or inference.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from dataset_builders.errors import InputError, in_ascii
from trainer.model.shape import DecoderShape
from trainer.parts.attention.part import Attention
from trainer.parts.experts.part import Experts
from trainer.parts.mlp.part import GatedMLP


class Keys(BaseModel):
    """The keys of one object. Types are strict, as in JSON: 2.0 is not an integer, and "2" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_other_types(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name]
        numbers = value if isinstance(value, list) else [value]
        # With a damaged file's integers, arithmetic would end in an error far from here.
        if field.annotation is not Any and any(isinstance(n, int) and abs(n) >= 2**31 for n in numbers):
            raise ValueError("only integers below 2,147,483,648 are understood; copy the model's own file again")
        if get_origin(field.annotation) is Literal:
            # 0 for False and 4.0 for 4 are refused, which pydantic takes for a Literal because they are equal.
            for allowed in get_args(field.annotation):
                if value == allowed and type(value) is not type(allowed):
                    raise ValueError(f"only this is understood: {allowed}")
        return value


def _refuse_integer(value: object) -> object:
    if isinstance(value, int):
        raise ValueError("transformers takes only a number with a point here, such as 1.0")
    return value


PointedFloat = Annotated[float, BeforeValidator(_refuse_integer)]
Count = Annotated[int, Field(gt=0, le=10_000)]  # of layers or experts: a shape has an entry for each


class CommonKeys(Keys):
    """The keys that transformers accepts in every config and that no forward pass reads: names, labels, dtypes and
    settings of `generate`."""

    # A type narrower than Any is transformers' own: with another value it could not load the config.

    architectures: list[str] | None = None
    auto_map: Any = None
    attn_implementation: Any = None
    attn_implementation_autoset: Any = Field(None, alias="_attn_implementation_autoset")
    commit_hash: Any = Field(None, alias="_commit_hash")
    name_or_path: Any = None
    own_name_or_path: Any = Field(None, alias="_name_or_path")
    transformers_version: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    initializer_range: PointedFloat = 0.02
    is_encoder_decoder: Literal[False] = False
    chunk_size_feed_forward: int = 0
    output_attentions: Any = None
    output_hidden_states: bool | None = False
    return_dict: Literal[True] = True  # without it, transformers' models of several parts fail
    use_cache: bool = True
    id2label: dict[str, str] | None = None
    label2id: dict[str, int] | None = None
    num_labels: int = 2
    problem_type: None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: NonNegativeInt | None = None
    max_length: Any = None
    min_length: Any = None
    do_sample: Any = None
    early_stopping: Any = None
    num_beams: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    no_repeat_ngram_size: Any = None
    num_return_sequences: Any = None


class RotaryKeys(Keys):
    """The keys of rope_parameters, or of rope_scaling, its older name; only angles without scaling are understood."""

    rope_type: Literal["default"] = "default"
    type: Literal["default"] = "default"
    rope_theta: PositiveFloat = None  # missing: the config's own rope_theta, then the family's default


class BackboneKeys(CommonKeys):
    """The keys of a Qwen language model, without those of its feed-forward layers."""

    vocab_size: PositiveInt = 151_936
    hidden_size: PositiveInt = 4096
    num_hidden_layers: Count = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = 32
    head_dim: int = Field(default=128, ge=2, multiple_of=2)
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh"] = "silu"
    rms_norm_eps: PointedFloat = Field(default=1e-6, gt=0)
    attention_bias: Literal[False] = False
    attention_dropout: float = Field(default=0.0, ge=0, le=0)
    use_sliding_window: Literal[False] = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    max_position_embeddings: int = 32_768
    rope_theta: PositiveFloat = None
    rope_parameters: RotaryKeys | None = None
    rope_scaling: RotaryKeys | None = None


class DecoderKeys(BackboneKeys):
    """The keys of a Qwen language model whose layers have MLPs."""

    intermediate_size: PositiveInt = 22_016


class ExpertKeys(Keys):
    """The keys of layers with experts."""

    num_experts: Count = None  # missing: the default of the family
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt
    norm_topk_prob: Literal[True] = True
    # For training with transformers; the trainer has `train.experts` instead.
    output_router_logits: bool = False
    router_aux_loss_coef: PointedFloat = 0.001


KeysT = TypeVar("KeysT", bound=Keys)
_REFUSED = {"quantization_config": "quantized weights are not trained; take the model as it was before"}


def read_keys(keys: type[KeysT], config: Mapping[str, Any], path: Path | str) -> KeysT:
    """Return the values of a parsed config.json."""
    try:
        return keys.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = in_ascii(".".join(map(str, first["loc"])), 200)
    if first["type"] == "missing":
        raise InputError(f"{path} has no {name}; copy the model's own config.json")
    if first["type"] == "extra_forbidden":
        way_out = _REFUSED.get(name, "remove it if the model computes the same without it, or take another model")
        raise InputError(f"{path}: {name} is a key that is not understood; {way_out}")
    given = json.dumps(first["input"])
    understood = first["msg"].replace("Input should be", "only this is understood:").removeprefix("Value error, ")
    raise InputError(f"{path}: {name} is {given if len(given) <= 60 else f'{given[:57]}...'}; {understood}")


RotaryT = TypeVar("RotaryT", bound=RotaryKeys)


def rotary_of(keys: Any, missing: RotaryT, default_theta: float) -> tuple[RotaryT, float]:
    """Return the rotary settings and their base, from the same keys as transformers."""
    # rope_scaling, the older name, takes precedence; an empty object counts as missing. Without a rope_theta in the
    # chosen object, the key of `keys` is used.
    rotaries = (rotary for rotary in (keys.rope_scaling, keys.rope_parameters) if rotary and rotary.model_fields_set)
    rotary = next(rotaries, missing)
    return rotary, float(rotary.rope_theta or keys.rope_theta or default_theta)


def attention_of(keys: BackboneKeys, where: str, *, gated: bool = False) -> Attention:
    """Return the attention of every layer that has one. `where` names the file and the object in messages."""
    heads, kv_heads = keys.num_attention_heads, keys.num_key_value_heads or keys.num_attention_heads
    if heads % kv_heads:
        raise InputError(
            f"{where}num_key_value_heads is {kv_heads}, which does not divide num_attention_heads={heads}; take a "
            "complete model"
        )
    return Attention(
        hidden_size=keys.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=keys.head_dim,
        gated=gated,
    )


def mlp_of(keys: DecoderKeys) -> GatedMLP:
    return GatedMLP(hidden_size=keys.hidden_size, intermediate_size=keys.intermediate_size, activation=keys.hidden_act)


def experts_of(keys: Any, count: int, where: str, *, may_be_transposed: bool = False, shared_size: int = 0) -> Experts:
    """Return the experts of every layer that has them; `keys` include `ExpertKeys`."""
    if keys.num_experts_per_tok > count:
        raise InputError(
            f"{where}num_experts_per_tok is {keys.num_experts_per_tok}, and num_experts {count}; take both from "
            "the same model"
        )
    return Experts(
        hidden_size=keys.hidden_size,
        num_experts=count,
        top_k=keys.num_experts_per_tok,
        intermediate_size=keys.moe_intermediate_size,
        activation=keys.hidden_act,
        shared_size=shared_size,
        may_be_transposed=may_be_transposed,
    )


def decoder_shape(keys: BackboneKeys, where: str, **own: Any) -> DecoderShape:
    """Return the language model's sizes, those that all families read alike and the family's own.

    Args:
        own: the other fields of `DecoderShape`.
    """
    if (keys.pad_token_id or 0) >= keys.vocab_size:
        raise InputError(
            f"{where}pad_token_id is {keys.pad_token_id}, and vocab_size {keys.vocab_size}; take both from the same "
            "model"
        )
    return DecoderShape(vocab_size=keys.vocab_size, hidden_size=keys.hidden_size, norm_eps=keys.rms_norm_eps, **own)
