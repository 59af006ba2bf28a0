"""The configs of the embedded data and of the embedded model."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from dataset_builders.contracts.strict import EVERY_FIELD, StrictModel
from dataset_builders.errors import shown
from dataset_builders.sources.embedded import NUM_SCANS
from trainer.model.registry import EMBEDDED, FAMILIES, get_family, get_variant, get_variants
from trainer.model.shape import ModelShape


class EmbeddedDataConfig(StrictModel):
    """The default data: its sizes and its seed."""

    later_fields = ("num_words",)

    seed: int = Field(ge=0, le=2**32 - 1, description="seed of the random choices in the data")
    num_scans: int = Field(default=NUM_SCANS, ge=10, le=NUM_SCANS, description="digit scans used, one per row")
    num_multi: int = Field(
        default=400, ge=0, le=10**6, description="rows with several questions about one scan, at most"
    )
    num_pairs: int = Field(default=400, ge=0, le=10**6, description="rows that compare two scans, at most")
    num_texts: int = Field(default=300, ge=0, le=10**6, description="rows without a picture, at most")
    num_words: int = Field(default=0, ge=0, le=10**6, description="rows that ask for the digit as a word, at most")


class EmbeddedEasyVqaConfig(StrictModel):
    """Identity of the data set easy-VQA: the version of the package that holds it."""

    kind: Literal["easy_vqa"] = Field(description="easy_vqa: the data set easy-VQA in place of the digits")
    version: Literal["1.0"] = Field(default="1.0", description="version of the package easy-vqa that is read")


class EmbeddedShapesConfig(StrictModel):
    """Drawn shapes to be found: their number and their seed."""

    kind: Literal["shapes"] = Field(description="shapes: drawn shapes to be found, in place of the digits")
    seed: int = Field(ge=0, le=2**32 - 1, description="seed of the drawing")
    num_one: int = Field(ge=0, le=10**7, description="pictures with a question about one shape")
    num_many: int = Field(ge=0, le=10**7, description="pictures with a question about any number of shapes")
    most_shapes: int = Field(default=4, ge=1, le=8, description="shapes of a picture, at most")
    sides: tuple[Annotated[int, Field(ge=32, le=1024)], ...] = Field(
        default=(96, 128, 160), min_length=1, description="pixels; each side of a picture is one of them"
    )


class EmbeddedMovesConfig(StrictModel):
    """Drawn clips of shapes that move: their number and their seed."""

    kind: Literal["moves"] = Field(description="moves: drawn clips of shapes that move, in place of the digits")
    seed: int = Field(ge=0, le=2**32 - 1, description="seed of the drawing")
    num_what: int = Field(ge=0, le=10**7, description="clips with a question about the shape that moves")
    num_where: int = Field(ge=0, le=10**7, description="clips with a question about the direction")
    num_when: int = Field(ge=0, le=10**7, description="clips with a question about the time of the movement")
    fps: int = Field(default=4, ge=1, le=60, description="frames a second of a clip")
    num_frames: int = Field(default=8, ge=4, le=32, description="frames of a clip")
    side: int = Field(default=96, ge=48, le=1024, multiple_of=16, description="width and height of a clip, in pixels")


class _CommonSizes(StrictModel):
    """The sizes that all families have."""

    kind: Literal["random"] = Field(default="random", description="random weights: the only kind")
    family: str = Field(
        default=EMBEDDED, description="qwen3_vl, qwen3_5, qwen3_vl_moe or qwen3_5_moe; without a variant, its smallest"
    )
    variant: str | None = Field(
        default=None, description="published sizes by name, as qwen3_vl_2b or qwen3_5_4b; null: tiny"
    )
    seed: int = Field(ge=0, le=2**32 - 1, description="seed of the random weights")
    vocab_size: int = Field(
        ge=384, le=2**20, multiple_of=128, description="rows of the embedding; the tokenizer fills at most these"
    )
    hidden_size: int = Field(gt=0, le=2**16, description="width of the language model")
    intermediate_size: int = Field(gt=0, le=2**18, description="width of the language model's gated MLP")
    num_layers: int = Field(gt=0, le=1024, description="layers of the language model")
    num_heads: int = Field(gt=0, le=1024, description="query heads of the language model")
    num_kv_heads: int = Field(gt=0, le=1024, description="key and value heads, a divisor of num_heads")
    head_dim: int = Field(ge=8, le=1024, multiple_of=8, description="width of a language head")
    tie_word_embeddings: bool = Field(default=True, description="the output projection is the embedding")
    vision_depth: int = Field(gt=0, le=1024, description="layers of the vision encoder")
    vision_hidden_size: int = Field(gt=0, le=2**16, description="width of the vision encoder")
    vision_num_heads: int = Field(gt=0, le=1024, description="heads of the vision encoder")
    vision_intermediate_size: int = Field(gt=0, le=2**18, description="width of the vision encoder's MLP")
    deepstack_indexes: tuple[int, ...] = Field(description="vision layers whose output is added to the language layers")
    position_grid: int = Field(default=16, gt=0, le=1024, description="side of the learned grid of vision positions")
    patch_size: int = Field(default=16, gt=0, le=1024, description="side of a patch in pixels")
    min_pixels: int = Field(gt=0, le=10**9, description="images with fewer pixels are scaled up to this area")
    max_pixels: int = Field(gt=0, le=10**9, description="images with more pixels are scaled down to this area")
    rope_theta: float = Field(default=10_000.0, gt=0, le=1e12, description="base of the rotary frequencies")
    initializer_range: float = Field(default=0.02, gt=0, le=1, description="standard deviation of the random weights")
    special_tokens: Literal["last", "first"] = Field(
        default="last", description="ids of the special tokens: after the text tokens as in Qwen, or before"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="dtype of the weights in the directory"
    )


_OF_FAMILIES = tuple(dict.fromkeys(sizes for name in FAMILIES for sizes in get_family(name).sizes))


class EmbeddedModelConfig(*_OF_FAMILIES, _CommonSizes):
    """Identity of a model with random weights: its sizes, its tokenizer's size and the seed.

    The classes of sizes that only some families have are in the folders of the parts, see `Family.sizes`.

    Sizes that are not given come from the variant; the default is the family's smallest variant. A variant's name and
    its sizes written out make the same artifact.
    """

    later_fields = ("family", "dtype", *(name for sizes in _OF_FAMILIES for name in sizes.later_fields))

    @model_validator(mode="before")
    @classmethod
    def _with_sizes_of_variant(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if given.get("variant") is None:
            family = given.get("family", EMBEDDED)
            sizes = get_variants(family)[f"{family}_tiny"]
        else:
            family, sizes = get_variant(given["variant"])
            if given.get("family", family) != family:
                raise ValueError(f"variant={given['variant']} is of {family}, not of family={shown(given['family'])}")
        nested = {  # a mapping that is given completes the variant's
            name: size | given[name]
            for name, size in sizes.items()
            if isinstance(size, Mapping) and isinstance(given.get(name), Mapping)
        }
        return sizes | given | nested | {"family": family}

    @model_serializer(mode="wrap")
    def dumped(self, whole: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Return the sizes. Only a dump of every field has the names that stand for them."""
        fields = StrictModel.dumped(self, whole, info)
        named = set() if info.context == EVERY_FIELD else {"kind", "variant"}
        return {name: value for name, value in fields.items() if name not in named}

    @model_validator(mode="after")
    def _family_fits(self) -> "EmbeddedModelConfig":
        own = get_family(self.family).sizes
        for sizes in _OF_FAMILIES:
            for name, field in sizes.model_fields.items():
                value = getattr(self, name)
                if sizes not in own and value != field.default:
                    others = " or ".join(other for other in FAMILIES if sizes in get_family(other).sizes)
                    raise ValueError(f"family={self.family} has no {name}; leave it out, or try family={others}")
                if sizes in own and value is None:
                    raise ValueError(f"family={self.family} needs {name}, which is null; leave it out")
        if self.deepstack_indexes and not get_variants(self.family)[f"{self.family}_tiny"]["deepstack_indexes"]:
            raise ValueError(f"family={self.family} has no deepstack; leave out deepstack_indexes")
        return self

    @model_validator(mode="after")
    def _shape_fits(self) -> "EmbeddedModelConfig":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.vision_hidden_size % (4 * self.vision_num_heads):
            raise ValueError(
                f"vision_hidden_size={self.vision_hidden_size} is not a multiple of 4 x vision_num_heads="
                f"{4 * self.vision_num_heads}: a vision head has rotary pairs for rows and for columns"
            )
        if any(not 0 <= i < self.vision_depth for i in self.deepstack_indexes):
            raise ValueError(f"deepstack_indexes={self.deepstack_indexes} must lie in [0, {self.vision_depth})")
        if len(self.deepstack_indexes) >= self.num_layers:
            levels = len(self.deepstack_indexes)
            raise ValueError(f"{levels} deepstack levels need more layers than num_layers={self.num_layers}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}")
        return self

    def hf_configs(self, ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return file name -> content of the directory's configs, in the family's form; `ids`: control token -> id."""
        return get_family(self.family).embedded(self.model_dump(context=EVERY_FIELD), ids)

    @property
    def shape(self) -> ModelShape:
        """The model's sizes, known before the model is made."""
        # The ids of control tokens, which the tokenizer will give, are in no size.
        return get_family(self.family).read_shape(self.hf_configs(defaultdict(int))["config.json"], "model")
