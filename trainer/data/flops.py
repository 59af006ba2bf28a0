"""Model FLOPs of a bin: the FLOPs of the model's arithmetic, forward and backward, without padding.

A matrix product of (n, a) by (a, b) is 2*n*a*b FLOPs. The gradient of its input costs the same, if something before the
product is trained, and so does the gradient of its weight, if the weight is trained. Adapters add their own products;
DoRA's row lengths, which are computed once per bin, and the patch embedding of the second frames of temporal groups,
some 0.3% of a patch's FLOPs, are not counted. Attention of s tokens is 4*s^2*width, half of that if causal, and twice
as much backward. Logits, and the last layer after its attention, count only for loss tokens, because other tokens do
not need them. With multi-token prediction its layer is the last, and its loss tokens count as many as the others.
Recomputation in backward is never counted.
"""

import re
from collections import defaultdict
from collections.abc import Sequence

from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import TrainConfig
from trainer.data.balance import CostModel
from trainer.data.micro_batch import MicroBatch
from trainer.model.adapters import adapted_layers, rules_to_save
from trainer.model.family import Family
from trainer.model.rules import Rule, index_of_layer
from trainer.model.shape import ModelShape, Work

FORWARD_AND_BACKWARD = 3
_AFTER_ATTENTION = re.compile(r"linear_proj|\.mlp\.")
_EMBEDDING, _HEAD = "language.embedding.weight", "language.output_layer.weight"


def model_flops(cost: CostModel, batch: MicroBatch) -> dict[str, float]:
    """Return the FLOPs of one bin in the language model, and in the vision encoder if the model has one: 0 if features
    were read. `cost` holds the FLOPs of one unit of each kind of work."""
    work = Work(
        tokens=batch.num_tokens,
        loss_tokens=batch.num_loss_tokens,
        tokens_squared=sum(n * n for n in batch.sample_lengths),
        patches=sum(batch.image_patches),
        patches_squared=sum(n * n for n in batch.image_patches),
    )
    encoded = 0.0 if batch.are_features_read else cost.vision(work)
    return ({"vision": encoded} if cost.per_patch else {}) | {"language": cost.language(work)}


def cost_model(shape: ModelShape) -> CostModel:
    """Return the costs for comparing bins: forward, and twice as much backward, whatever is trained."""
    # Not `training_cost`: with another cost the bins of an unfinished training would move to other ranks.
    return CostModel(**{name: FORWARD_AND_BACKWARD * flops for name, flops in shape.forward_flops.items()})


def training_cost(shape: ModelShape, family: Family, train: TrainConfig) -> CostModel:
    """Return the FLOPs, forward and backward, of one unit of each kind of work in this training."""
    count = _Count(shape, family, train)
    needs_grad = count.vision() if shape.vision is not None else False
    count.language(needs_grad)
    return CostModel(**{name: float(count.flops[name]) for name in CostModel.__dataclass_fields__})


class _Count:
    """A sum of FLOPs over the table of weights, in the order of the forward pass.

    In all methods `needs_grad` means that something earlier is trained, so that a gradient flows back to it.
    """

    def __init__(self, shape: ModelShape, family: Family, train: TrainConfig) -> None:
        self.shape, self.family, self.frozen = shape, family, train.frozen
        self.rules: Sequence[Rule] = family.weight_rules(shape)
        self.adapter: AdapterConfig | None = train.adapter
        self.chosen: dict[str, tuple[bool, ...]] = {}  # our name of each adapted layer -> which of its modules are
        self.whole: set[str] | None = None  # our names of the weights trained whole beside adapters; None: no adapters
        if train.adapter is not None:
            self.chosen = {layer.rule.ours: layer.chosen for layer in adapted_layers(self.rules, train.adapter)}
            self.whole = {rule.ours for rule in rules_to_save(self.rules, train.adapter)}
        self.flops: defaultdict[str, float] = defaultdict(float)

    def vision(self) -> bool:
        """Count the encoder and its mergers; return whether any part of them is trained."""
        vision, needs_grad = self.shape.vision, False
        forward, block, mergers = vision.forward_flops, vision.spatial_merge_size**2, {}
        attention = forward["per_patch_squared"] / vision.num_layers
        pixels = forward["per_patch"]  # reduced below by the matrices of the table; the product with the pixels remains
        for rule in (rule for rule in self.rules if not rule.ours.startswith("language.")):
            merger = rule.ours.rsplit(".", 2)[0] if self.family.part_of(rule.ours) == "merger" else None
            # Mergers branch off the encoder: what one of them trains sends no gradient through the next.
            before = needs_grad if merger is None else mergers.get(merger, needs_grad)
            if "linear_proj.weight" in rule.ours:
                self.flops["per_patch_squared"] += attention * (1 + 2 * needs_grad)
            if "patch_embed.weight" in rule.ours:
                is_embedding_trained = self._trains(rule)
            self.flops["per_patch"] += self._products(rule, before) / (1 if merger is None else block)
            pixels -= 2 * _size(rule) / (1 if merger is None else block)
            after = before or self._changes(rule)
            if merger is None:
                needs_grad = after
            else:
                mergers[merger] = after
        # Pixels need no gradient, so the product with them costs once more only for its weight.
        self.flops["per_patch"] += pixels * (1 + is_embedding_trained)
        return needs_grad or any(mergers.values())

    def language(self, needs_grad: bool) -> None:
        decoder, layers, others = self.shape.language, defaultdict(list), {}
        for rule in self.rules:
            if (number := index_of_layer(rule.ours)) is not None:
                layers[number].append(rule)
            elif rule.ours.startswith("language."):
                others[rule.ours] = rule
        needs_grad = needs_grad or self._trains(others[_EMBEDDING])
        for number in range(decoder.num_layers):
            before, after, squared = decoder.layers[number].flops
            is_after = [_AFTER_ATTENTION.search(rule.ours) is not None for rule in layers[number]]
            split = is_after.index(True)  # the table has a layer's weights in the order of the forward pass
            needs_grad = self._half(layers[number][:split], before, "per_token", needs_grad)
            self.flops["per_token_squared"] += squared * (1 + 2 * needs_grad)
            is_last = number == decoder.num_layers - 1 and decoder.mtp is None
            # After the last layer's attention only loss tokens are computed.
            rows = "per_loss_token" if is_last else "per_token"
            needs_grad = self._half(layers[number][split:], after, rows, needs_grad)
        head = others.get(_HEAD, others[_EMBEDDING])
        needs_grad = needs_grad or any(self._trains(rule) for name, rule in others.items() if "norm" in name)
        logits = 2 * decoder.hidden_size * decoder.vocab_size
        self.flops["per_loss_token"] += logits * (1 + needs_grad + self._trains(head))
        if decoder.mtp is not None:  # everything before it is trained, and so is all of it
            before, after, squared = decoder.mtp.flops
            for rows, forward in zip(
                ("per_token", "per_loss_token", "per_token_squared"), (before, after + logits, squared)
            ):
                self.flops[rows] += FORWARD_AND_BACKWARD * forward

    def _half(self, rules: Sequence[Rule], forward: int, rows: str, needs_grad: bool) -> bool:
        """Count a part of a layer with these forward FLOPs per row; return whether a gradient flows through the next
        part."""
        for rule in rules:
            self.flops[rows] += self._products(rule, needs_grad)
            forward -= 2 * _size(rule)
            needs_grad = needs_grad or self._changes(rule)
        # FLOPs that belong to no matrix of the table (the delta rule) cost twice as much backward.
        self.flops[rows] += forward * (1 + 2 * needs_grad)
        return needs_grad

    def _products(self, rule: Rule, needs_grad: bool) -> float:
        """Return the FLOPs per row of a linear layer's weight and its adapters."""
        flops = 2 * _size(rule) * (1 + needs_grad + self._trains(rule))
        for (out, width), is_chosen in zip(rule.sizes, self._adapted(rule)):
            if is_chosen:  # forward A and B; backward both weights, the value between them, and the input
                flops += 2 * rule.used * self.adapter.rank * ((2 + needs_grad) * width + 3 * out)
        return flops

    def _trains(self, rule: Rule) -> bool:
        """Whether the weight itself is trained."""
        is_free = self.family.part_of(rule.ours) not in self.frozen
        return is_free and (self.whole is None or rule.ours in self.whole)

    def _adapted(self, rule: Rule) -> Sequence[bool]:
        is_free = self.family.part_of(rule.ours) not in self.frozen
        return self.chosen.get(rule.ours, ()) if is_free else ()

    def _changes(self, rule: Rule) -> bool:
        return self._trains(rule) or any(self._adapted(rule))


def _size(rule: Rule) -> int:
    """Return the number of elements of a linear layer's weight that a row is multiplied with."""
    return rule.used * sum(out * width for out, width in rule.sizes)
