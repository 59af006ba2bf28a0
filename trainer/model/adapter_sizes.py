"""What adapters add to each place of a model, in numbers: for its estimate of memory. Without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shared:
    """Numbers of which tensor-parallel ranks have a part each, and numbers that each of them has."""

    divided: int = 0
    whole: int = 0

    def on(self, tp: int) -> float:
        """Numbers on each of `tp` ranks."""
        return self.divided / tp + self.whole

    def plus(self, other: "Shared") -> "Shared":
        return Shared(self.divided + other.divided, self.whole + other.whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceSizes:
    """A layer of the language model, or a part of the vision encoder.

    Attributes:
        parameters: of the adapters that are trained.
        products: numbers of the matrices that the adapters' products keep for backward: a layer's A's one after
            another, and its B's as blocks of a matrix.
        per_token: numbers that the adapters keep for backward per token that goes through the place.
        base: weights of all linear layers that can have adapters.
    """

    parameters: Shared = Shared()
    products: Shared = Shared()
    per_token: Shared = Shared()
    base: int = 0

    def plus(self, other: "PlaceSizes") -> "PlaceSizes":
        return PlaceSizes(
            parameters=self.parameters.plus(other.parameters),
            products=self.products.plus(other.products),
            per_token=self.per_token.plus(other.per_token),
            base=self.base + other.base,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSizes:
    """A whole model.

    Attributes:
        language: of each layer.
        vision: of the other parts, "vision" and "merger", by name.
        has_float8_base: the language layers' weights of `base` are a byte each.
    """

    language: tuple[PlaceSizes, ...]
    vision: Mapping[str, PlaceSizes] = field(default_factory=dict)
    has_float8_base: bool = False

    @property
    def parameters(self) -> int:
        """Of all adapters that are trained."""
        return round(sum(place.parameters.on(1) for place in (*self.language, *self.vision.values())))

    def trains(self, part: str) -> bool:
        """Whether a part other than the language model has adapters that are trained."""
        return part in self.vision and self.vision[part].parameters.on(1) > 0

    def saved_bytes(self, layers: Iterable[PlaceSizes], size: int) -> int:
        """Bytes that the weights of these language layers take less than numbers of `size` bytes would."""
        return (size - 1) * sum(layer.base for layer in layers) if self.has_float8_base else 0
