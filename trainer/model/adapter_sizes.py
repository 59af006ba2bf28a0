"""The sizes of a model's adapters, layer by layer, for the estimate of memory. Without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shared:
    """Counts of values that tensor-parallel ranks divide, and of values that every rank holds whole."""

    divided: int = 0
    whole: int = 0

    def on(self, tp: int) -> float:
        """Return the number of values on each of `tp` ranks."""
        return self.divided / tp + self.whole

    def plus(self, other: "Shared") -> "Shared":
        return Shared(self.divided + other.divided, self.whole + other.whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceSizes:
    """The adapter sizes of a layer of the language model, or of a part of the vision encoder."""

    parameters: Shared = Shared()  # number of parameters of the trained adapters
    # number of values in the matrices that the adapters' products keep for backward: a layer's concatenated A's, and
    # its B's as blocks of a matrix
    products: Shared = Shared()
    per_token: Shared = Shared()  # number of values that the adapters keep for backward, per token of the layer or part
    base: int = 0  # number of weights of all linear layers that can have adapters, without experts
    experts_parameters: int = 0  # number of parameters of the trained adapters of experts
    experts_base: int = 0  # number of weights of the experts that can have adapters

    def plus(self, other: "PlaceSizes") -> "PlaceSizes":
        return PlaceSizes(
            parameters=self.parameters.plus(other.parameters),
            products=self.products.plus(other.products),
            per_token=self.per_token.plus(other.per_token),
            base=self.base + other.base,
            experts_parameters=self.experts_parameters + other.experts_parameters,
            experts_base=self.experts_base + other.experts_base,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSizes:
    """The adapter sizes of a whole model."""

    language: tuple[PlaceSizes, ...]  # sizes of each layer
    # sizes of the other parts, "vision" and "merger", by name
    vision: Mapping[str, PlaceSizes] = field(default_factory=dict)
    has_float8_base: bool = False  # whether the weights that `base` counts take one byte each in the language layers

    @property
    def parameters(self) -> int:
        places = (*self.language, *self.vision.values())
        return round(sum(place.parameters.on(1) + place.experts_parameters for place in places))

    def trains(self, part: str) -> bool:
        """Whether a part other than the language model has adapters that are trained."""
        return part in self.vision and self.vision[part].parameters.on(1) > 0

    def saved_bytes(self, layers: Iterable[PlaceSizes], size: int, tp: int, ep: int) -> float:
        """Return the bytes that a rank's weights of these language layers save against values of `size` bytes."""
        is_saved = self.has_float8_base
        return is_saved * (size - 1) * sum(layer.base / tp + layer.experts_base / ep for layer in layers)
