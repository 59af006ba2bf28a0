"""An estimate of the memory that a training takes, computed only from the model's shape, without torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.model.adapters import AdapterSizes, LayerAdapterSizes
from trainer.model.shape import LOSS_CHUNK, ModelShape, VisionShape

# Memory that torch's allocator holds in addition to the activations, as a fraction of them.
# Bins of unequal shapes leave fragments. tests/trainer/plan/test_measured_memory.py compares every measured peak.
RESERVE = 0.1


def estimate_memory(
    shape: ModelShape,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    pieces: Sequence[range],
    dp: int,
    seq_len: int,
    max_patches: int,
    adapters: AdapterSizes | None = None,
) -> dict[str, int]:
    """Estimate the bytes that the fullest process needs to train, by purpose. In a pipeline this is often the first
    process (vision) or the last one (logits).

    Model state, for P parameters on a process and the distributed optimizer over n = dp x cp ranks: weights 4 P, or in
    bfloat16 2 P plus 4 P / n for float32 copies; gradients 4 P; AdamW's two moments 8 P / n, or 4 P / n in bfloat16.
    With fsdp it is (4 + 4 + 8) P / dp plus what is gathered, see `_gathered`; without it these figures are exact. P
    counts language matrices / tp, vision whole unless vision_split=tensor_parallel, and experts / ep and not / tp,
    whose n is dp x cp x tp / ep. Frozen parameters count only as weights, without float32 copies; so does the base
    model of adapters.

    Activations: in half precision a layer of width D takes 6 D bytes per token, for the inputs of its two halves and
    one that is on its way (its norms are computed again, see trainer/layers/recompute.py), and 2 / tp for each number
    that its halves keep, see `Part.saved_activations`, for every micro batch in flight. Sequence parallel divides all
    of it by tp; recomputation leaves 2 D, and one whole layer.

    Args:
        pieces: the language layers of each piece of the pipeline, see `pipeline_pieces`.
        dp: number of data-parallel ranks.
        adapters: see `trainer.model.adapters.adapter_sizes`.
    """
    num_micro_batches = train.global_batch_size // dp
    sizes = (seq_len, max_patches, *_sizes(train))
    work = _Process(shape, parallel, train.frozen, pieces, dp, num_micro_batches, *sizes, adapters)
    return max((work.memory(rank) for rank in range(parallel.pp)), key=lambda parts: sum(parts.values()))


def estimate_vision_rank(
    shape: ModelShape,
    train: TrainConfig,
    *,
    tp: int,
    recompute: bool,
    patches: float,
    in_flight: float,
    adapters: AdapterSizes | None = None,
) -> dict[str, int]:
    """Estimate the bytes of a process that holds only a copy of the vision encoder with its mergers, by the rules of
    `estimate_memory`: weights, gradients of trained parameters, and activations.

    Args:
        patches: number of patches that the process encodes at a time.
        in_flight: number of encoder passes before the gradients of the first pass arrive.
    """
    vision = _Vision(shape.vision, train.frozen, _sizes(train)[0], tp, recompute, adapters)
    parts = {"weights": vision.weights, "gradients": 4 * vision.trained}
    parts["activations"] = vision.activations(patches, in_flight)
    parts["reserve"] = RESERVE * parts["activations"]
    return {name: round(value) for name, value in parts.items()}


def estimate_saved(
    shape: ModelShape,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    pieces: Sequence[range],
    dp: int,
    adapters: AdapterSizes | None = None,
) -> int:
    """Estimate the bytes of a checkpoint that the fullest process writes. Asynchronous saves copy them to host memory.

    For P parameters on a process, with the distributed optimizer over n = dp x cp ranks: one of the n ranks writes the
    weights (2 P in bfloat16, 4 P in float32), and each rank writes 12 P / n of float32 weights and moments, or 8 P / n
    with moments in bfloat16. Frozen parameters add only their weights, and with adapters nothing. With fsdp it is
    12 P / dp.
    """
    work = _Process(shape, parallel, train.frozen, pieces, dp, 1, 1, 0, *_sizes(train), adapters)
    return max(work.saved(rank) for rank in range(parallel.pp))


def vision_in_flight(parallel: ParallelConfig) -> int:
    """Return the micro batches whose images a rank has encoded and whose gradients it awaits, if vision is dealt."""
    return (3 if parallel.vpp > 1 else 2) * parallel.pp


def _sizes(train: TrainConfig) -> tuple[int, int]:
    """Return the bytes of a number in forward and backward, and of a number of Adam's moments."""
    return 4 if train.precision == "float32" else 2, 4 if train.optim.moments == "float32" else 2


def _layer_bytes(
    width: int, kept: Sequence[int], size: int, in_flight: float, tp: int, is_cut: bool, recompute: bool
) -> float:
    """Return the bytes per token of some layers, for the micro batches in flight; `kept` has the numbers that each
    layer keeps per token in addition to the inputs of its halves."""
    whole_width = width / tp if is_cut else width
    layers = [size * (3 * whole_width + numbers / tp) for numbers in kept]
    if recompute:
        return in_flight * len(layers) * size * whole_width + max(layers, default=0)
    return in_flight * sum(layers)


def _adapter_bytes(place: LayerAdapterSizes, tokens: float, size: int, tp: int) -> float:
    """Return the bytes that the adapters at one point of the model keep for backward."""
    return size * (tokens * place.per_token.on(tp) + place.products.on(tp))


@dataclass(frozen=True, slots=True)
class _Vision:
    """The vision encoder with its mergers, on a rank that holds it."""

    shape: VisionShape | None
    frozen: Collection[str]
    size: int  # bytes of a number in forward and backward
    tp: int  # ranks that divide its matrices
    recompute: bool
    adapters: AdapterSizes | None

    @property
    def trained(self) -> float:
        if self.adapters is not None:
            return sum(place.parameters.on(self.tp) for place in self.adapters.vision.values())
        return self._parameters(self.frozen)

    @property
    def has_gradients(self) -> bool:
        """Whether the layers keep activations for backward."""
        return "vision" not in self.frozen and (self.adapters is None or self.adapters.trains("vision"))

    @property
    def weights(self) -> float:
        """Bytes of the weights in forward and backward."""
        weights = self.size * self._parameters()
        if self.adapters is not None:
            weights += self.size * self.trained
        return weights

    def _parameters(self, without: Collection[str] = ()) -> float:
        counts = {} if self.shape is None else self.shape.parameters
        return sum(count for part, count in counts.items() if part not in without) / self.tp

    def activations(self, patches: float, in_flight: float) -> float:
        """Return the activation bytes of these patches for the micro batches in flight."""
        if self.shape is None:
            return 0
        width, layers = self.shape.hidden_size, self.shape.num_layers
        # Queries, keys and values, the attention's output, and the input of the GELU, which is four times as wide.
        kept, tp, adapters = [8 * width] * layers, self.tp, self.adapters
        if not self.has_gradients:
            # Frozen layers run without an autograd graph, so that only one layer's activations exist at a time.
            total = patches * _layer_bytes(width, kept[:1], self.size, 1, tp, False, False)
        else:
            total = patches * _layer_bytes(width, kept, self.size, in_flight, tp, False, self.recompute)
        if adapters is not None:
            blocks = _adapter_bytes(adapters.vision["vision"], patches, self.size, tp)
            total += blocks / layers if self.recompute else in_flight * blocks
            # The mergers are not recomputed.
            tokens = patches / self.shape.spatial_merge_size**2
            total += in_flight * _adapter_bytes(adapters.vision["merger"], tokens, self.size, tp)
        return total


@dataclass(frozen=True, slots=True)
class _Process:
    shape: ModelShape
    parallel: ParallelConfig
    frozen: Collection[str]
    pieces: Sequence[range]
    dp: int
    num_micro_batches: int
    seq_len: int
    max_patches: int
    size: int  # bytes of a number in forward and backward
    moment_size: int  # bytes of a number of Adam's moments
    adapters: AdapterSizes | None

    def memory(self, rank: int) -> dict[str, int]:
        """Estimate the bytes of a pipeline rank, by purpose."""
        weights, trained, share = self._weights(rank), self._trained(rank), self._optimizer_share(rank)
        ranks = self.dp * self.parallel.cp
        parts = {
            "weights": weights + (4 * share if self.size == 2 else 0),
            "gradients": 4 * trained,
            "optimizer": 2 * self.moment_size * share,
        }
        if self.parallel.sharding == "fsdp":
            parts |= {"weights": 4 * weights / self.size / ranks, "gradients": 4 * trained / ranks}
        # Each pipeline rank except the first then holds a copy of the encoder, without optimizer states.
        if rank > 0 and self.parallel.deals_vision:
            parts["weights"] += self._vision.weights
            parts["gradients"] += 4 * self._vision.trained
        activations = self._activations(rank)
        parts |= {"activations": activations, "reserve": RESERVE * activations}
        if self.parallel.sharding == "fsdp":
            parts["gathered"] = self._gathered()
        # With fsdp no rank ever holds more than its part, so the start takes nothing more.
        elif (more := self._start(weights, trained) - sum(parts.values())) > 0:
            parts["start"] = more
        return {name: round(value) for name, value in parts.items()}

    def _start(self, weights: float, trained: float) -> float:
        """Return the peak bytes of a pipeline rank before its first step. megatron-core copies the trained weights into
        one buffer, and briefly holds both; a float8 base is made from one matrix at a time, in three forms."""
        matrix = 0.0
        if self.adapters is not None and self.adapters.has_float8_base:
            matrix = self.shape.language.largest_matrix / self.parallel.tp
        return max(weights + (self.size + 4) * trained, weights + 3 * self.size * matrix)

    def _gathered(self) -> float:
        """Return the bytes that FSDP2 holds whole in forward and backward: the weights outside of layers, the weights
        of two layers, and the gradients of one of these units before and after their cast to float32. It is only for
        data parallel."""
        decoder, vision = self.shape.language, self.shape.vision
        layer = max(layer.parameters for layer in decoder.layers)
        outside = (1 if decoder.tie_word_embeddings else 2) * decoder.vocab_size * decoder.hidden_size
        if vision is not None:
            outside += vision.parameters["merger"] + vision.num_positions * vision.hidden_size
        return self.size * (outside + 2 * layer) + (self.size + 4) * max(outside, layer) * (self.adapters is None)

    def saved(self, rank: int) -> int:
        """Return the bytes of a checkpoint that a pipeline rank writes."""
        trained = self._trained(rank)
        weights = self._weights(rank) if self.adapters is None else self.size * trained
        if self.parallel.sharding == "fsdp":
            return round((4 * weights / self.size + 2 * self.moment_size * trained) / (self.dp * self.parallel.cp))
        return round(weights + (4 + 2 * self.moment_size) * self._optimizer_share(rank))

    @property
    def _vision(self) -> _Vision:
        p = self.parallel
        tp = p.tp if p.vision_split == "tensor_parallel" else 1
        return _Vision(self.shape.vision, self.frozen, self.size, tp, p.recompute_vision, self.adapters)

    def _layers(self, rank: int) -> list[int]:
        return list(chain.from_iterable(self.pieces[rank :: self.parallel.pp]))

    def _trained(self, rank: int) -> float:
        """Return the number of a pipeline rank's trained parameters."""
        vision = self._vision.trained if rank == 0 else 0
        if self.adapters is not None:
            places = sum(place.parameters.on(self.parallel.tp) for place in self._places(rank))
            return places + self._trained_experts(rank) + vision
        return self._language(rank) * ("language" not in self.frozen) + vision

    def _optimizer_share(self, rank: int) -> float:
        """Return the number of trained parameters whose float32 copies and moments are on one rank."""
        p, trained, of_experts = self.parallel, self._trained(rank), self._trained_experts(rank)
        ranks = self.dp * p.cp
        return (trained - of_experts) / ranks + of_experts / (ranks * p.tp / p.ep)

    def _trained_experts(self, rank: int) -> float:
        """Return the number of a pipeline rank's trained parameters that expert-parallel ranks divide."""
        if self.adapters is not None:
            return sum(place.experts_parameters for place in self._places(rank)) / self.parallel.ep
        return self._of_experts(rank) / self.parallel.ep * ("language" not in self.frozen)

    def _weights(self, rank: int) -> float:
        """Return the bytes of a pipeline rank's weights in forward and backward."""
        weights, tp = self.size * self._language(rank), self.parallel.tp
        if self.adapters is not None:
            weights -= self.adapters.saved_bytes(self._places(rank), self.size, tp, self.parallel.ep)
            weights += self.size * sum(place.parameters.on(tp) for place in self._places(rank))
            weights += self.size * self._trained_experts(rank)
        return weights + (self._vision.weights if rank == 0 else 0)

    def _places(self, rank: int) -> list[LayerAdapterSizes]:
        """Return the sizes of the adapters in each language layer of a pipeline rank; empty without adapters."""
        return [] if self.adapters is None else [self.adapters.language[number] for number in self._layers(rank)]

    def _language(self, rank: int) -> float:
        """Return the number of parameters of a pipeline rank's part of the language model."""
        decoder, parallel = self.shape.language, self.parallel
        is_first, is_last = rank == 0, rank == parallel.pp - 1
        embeddings = is_first + is_last if parallel.pp > 1 or not decoder.tie_word_embeddings else 1
        layers = (decoder.layers[number] for number in self._layers(rank))
        language = sum(layer.parameters for layer in layers) + decoder.hidden_size * is_last
        language += embeddings * decoder.vocab_size * decoder.hidden_size
        of_experts, undivided = self._of_experts(rank), 0
        if decoder.mtp is not None:
            undivided = decoder.mtp.undivided
            language += decoder.mtp.layer.parameters
        return (language - of_experts) / parallel.tp + of_experts / parallel.ep + undivided

    def _of_experts(self, rank: int) -> int:
        """Return the number of parameters of all experts of a pipeline rank's layers."""
        layers = (self.shape.language.layers[number] for number in self._layers(rank))
        of_mtp = 0 if self.shape.language.mtp is None else self.shape.language.mtp.layer.feed_forward.expert_parameters
        return sum(layer.feed_forward.expert_parameters for layer in layers) + of_mtp

    def _activations(self, rank: int) -> float:
        decoder, p = self.shape.language, self.parallel
        tokens, is_cut = self.seq_len / p.cp, p.sequence_parallel
        chunk_passes = 2 * (p.pp - 1 - rank) + (p.vpp - 1) * p.pp + 1 if p.vpp > 1 else p.pp - rank
        is_selective = p.recompute == "selective"
        layers = [decoder.layers[number] for number in self._layers(rank)]
        # A delta layer's backward briefly takes 2 KB more per token and value head, for one layer at a time: not
        # counted.
        kept = [layer.saved_activations(selective=is_selective) for layer in layers]
        if decoder.mtp is not None:
            layers.append(decoder.mtp.layer)
            kept.append(decoder.mtp.saved_activations(selective=is_selective))
        if p.ep > 1:  # the tokens that backward gathers again, and the memory of rows for the tokens of other ranks
            parts = [layer.feed_forward for layer in layers]
            divided = [
                decoder.hidden_size * part.routes_tokens + (p.ep - 1) * part.expert_activations(selective=is_selective)
                for part in parts
            ]
            kept = [numbers + more for numbers, more in zip(kept, divided, strict=True)]
        in_flight = min(chunk_passes / p.vpp, self.num_micro_batches)
        is_full = p.recompute == "full"
        total = tokens * _layer_bytes(decoder.hidden_size, kept, self.size, in_flight, p.tp, is_cut, is_full)
        added = [_adapter_bytes(place, tokens, self.size, p.tp) for place in self._places(rank)]
        total += max(added, default=0) if is_full else in_flight * sum(added)
        total += self.size * self._transient_activations(rank, tokens)
        if rank == 0 or p.deals_vision:
            images = self._vision_activations()
            total = total + images if self._vision.has_gradients else max(total, images)
        return total

    def _transient_activations(self, rank: int, tokens: float) -> float:
        """Return the numbers that exist for a moment: those of one layer, and the logits of one chunk of loss
        tokens."""
        decoder, p = self.shape.language, self.parallel
        layers = [decoder.layers[number] for number in self._layers(rank)]
        of_layer = tokens * p.ep * max((layer.feed_forward.transient_activations for layer in layers), default=0)
        if self.adapters is not None and self.adapters.has_float8_base:
            of_layer += decoder.largest_matrix / p.tp  # unpacked
        elif self.adapters is None and "language" not in self.frozen:
            # The gradient of one layer's experts exists twice, before it is added to the others'.
            of_layer += max((layer.feed_forward.expert_parameters for layer in layers), default=0) / p.ep
        # Multi-token prediction has logits of its own (not measured).
        losses = (rank == p.pp - 1) * (1 if decoder.mtp is None else 2)
        logits = losses * min(tokens, LOSS_CHUNK) * decoder.vocab_size / p.tp
        # With full recomputation they share memory, because the layers are then no CUDA graphs, which have memory of
        # their own.
        return max(of_layer, logits) if p.recompute == "full" else of_layer + logits

    def _vision_activations(self) -> float:
        p, vision = self.parallel, self._vision
        in_flight, sharers = (2 * p.pp - 1 if p.vpp > 1 else p.pp), p.cp * p.tp // vision.tp
        if p.deals_vision:
            # Images are encoded ahead of the pipeline and wait for their gradients.
            in_flight, sharers = vision_in_flight(p), sharers * p.pp
        return vision.activations(self.max_patches / sharers, min(in_flight, self.num_micro_batches))
