"""The memory that a training takes, from the model's shape alone, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from trainer.contract.model_shape import LOSS_CHUNK, ModelShape
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig


def estimate_memory(
    shape: ModelShape,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    pieces: Sequence[range],
    dp: int,
    seq_len: int,
    max_patches: int,
) -> dict[str, int]:
    """Bytes that the fullest process needs to train: of a pipeline often its first (vision) or its last (logits).

    Of P parameters on a process, with the distributed optimizer over n = dp x cp ranks: weights 4 P, or in bfloat16
    2 P and 4 P / n of float32 copies; gradients 4 P; AdamW's two moments 8 P / n, in bfloat16 4 P / n. With fsdp
    (4 + 4 + 8) P / dp, without the layers that are gathered for a moment. P counts language matrices / tp, and vision
    whole unless vision_split=tensor_parallel. Without fsdp these are exact.

    Activations are a rule of thumb for attention that keeps no score matrix (Korthikanti et al. 2022,
    arXiv:2205.05198, table 2). Bytes per token and layer of width D in half precision are 10 D + (16 D + 2 A) / tp;
    with sequence parallel all is divided by tp; if recomputed 2 D, and one whole layer more. A is the numbers that the
    heads keep (`DecoderShape.kept_numbers`): 4 D by the table; with h gates of d, 2 h d more; of a gated delta net with
    k and v numbers of keys and values and H value heads 4 k + 5 v + 6 H, what its kernels save (backward takes 2 KB per
    token and value head for a moment more, of one layer at a time). Tokens are seq_len / cp; patches are max_patches /
    (tp x cp) if the images are dealt evenly, max_patches / cp with vision_split=tensor_parallel. All this
    exists for every micro batch in flight. The last process adds the logits of one chunk of loss tokens, at most 4096 x
    vocabulary / tp. Qwen3-VL-2B in bins of 8,192 tokens and 25,300 patches: 77 GB by this; measured on an H200: 80 GB
    without CUDA graphs, and about as much with them, of which 11 are the graphs' own.

    Args:
        pieces: of the pipeline, see `pipeline_pieces`.
        dp: data-parallel ranks.
    """
    num_micro_batches = train.global_batch_size // dp
    work = _Work(shape, parallel, pieces, dp, num_micro_batches, seq_len, max_patches, *_sizes(train))
    return max((work.memory(rank) for rank in range(parallel.pp)), key=lambda parts: sum(parts.values()))


def estimate_saved(
    shape: ModelShape,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    pieces: Sequence[range],
    dp: int,
) -> int:
    """Bytes of a checkpoint that the fullest process writes, and copies into host memory if saves are asynchronous.

    Of P parameters on a process, with the distributed optimizer over n = dp x cp ranks: the weights, 2 P in bfloat16
    and 4 P in float32, written by one of the n, and 12 P / n of float32 weights and moments, or 8 P / n with moments in
    bfloat16. With fsdp 12 P / dp.
    """
    work = _Work(shape, parallel, pieces, dp, 1, 1, 0, *_sizes(train))
    return max(work.saved(rank) for rank in range(parallel.pp))


def _sizes(train: TrainConfig) -> tuple[int, int]:
    """Bytes of a number in forward and backward, and of one of Adam's moments."""
    return 4 if train.precision == "float32" else 2, 4 if train.optim.moments == "float32" else 2


@dataclass(frozen=True, slots=True)
class _Work:
    shape: ModelShape
    parallel: ParallelConfig
    pieces: Sequence[range]
    dp: int
    num_micro_batches: int
    seq_len: int
    max_patches: int
    size: int  # bytes of a number in forward and backward
    moment_size: int  # bytes of a number of Adam's moments

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes of a pipeline rank."""
        parameters, ranks = self._parameters(rank), self.dp * self.parallel.cp
        weights, gradients, moments = 4 * parameters, 4 * parameters, 2 * self.moment_size * parameters / ranks
        if self.parallel.sharding == "fsdp":
            weights, gradients = weights / ranks, gradients / ranks
        elif self.size == 2:
            weights = 2 * parameters + 4 * parameters / ranks
        parts = {"weights": weights, "gradients": gradients, "optimizer": moments}
        return {name: round(value) for name, value in (parts | {"activations": self._activations(rank)}).items()}

    def saved(self, rank: int) -> int:
        """Bytes that a pipeline rank writes."""
        parameters = self._parameters(rank)
        weights = 0 if self.parallel.sharding == "fsdp" else self.size * parameters
        return round(weights + (4 + 2 * self.moment_size) * parameters / (self.dp * self.parallel.cp))

    def _layers(self, rank: int) -> list[int]:
        """The numbers of the language layers of a pipeline rank."""
        return list(chain.from_iterable(self.pieces[rank :: self.parallel.pp]))

    def _parameters(self, rank: int) -> float:
        decoder, parallel = self.shape.language, self.parallel
        is_first, is_last = rank == 0, rank == parallel.pp - 1
        embeddings = is_first + is_last if parallel.pp > 1 or not decoder.tie_word_embeddings else 1
        language = sum(map(decoder.layer_parameters, self._layers(rank))) + decoder.hidden_size * is_last
        language += embeddings * decoder.vocab_size * decoder.hidden_size
        others = sum(count for part, count in self.shape.parameters.items() if part != "language") * is_first
        return language / parallel.tp + others / (parallel.tp if parallel.vision_split == "tensor_parallel" else 1)

    def _activations(self, rank: int) -> float:
        decoder, vision, p = self.shape.language, self.shape.vision, self.parallel
        tokens, is_cut = self.seq_len / p.cp, p.sequence_parallel
        chunk_passes = 2 * (p.pp - 1 - rank) + (p.vpp - 1) * p.pp + 1 if p.vpp > 1 else p.pp - rank
        is_selective = p.recompute == "selective"
        kept = [decoder.kept_numbers(number, selective=is_selective) for number in self._layers(rank)]
        in_flight = min(chunk_passes / p.vpp, self.num_micro_batches)
        total = tokens * self._layer_bytes(decoder.hidden_size, kept, in_flight, p.tp, is_cut, p.recompute == "full")
        if rank == 0 and vision is not None:
            kept, tp = [4 * vision.hidden_size] * vision.num_layers, p.tp if p.vision_split == "tensor_parallel" else 1
            in_flight = min(2 * p.pp - 1 if p.vpp > 1 else p.pp, self.num_micro_batches)
            per_patch = self._layer_bytes(vision.hidden_size, kept, in_flight, tp, False, p.recompute_vision)
            total += self.max_patches / (p.cp * p.tp // tp) * per_patch
        if rank == p.pp - 1:
            total += self.size * min(tokens, LOSS_CHUNK) * decoder.vocab_size / p.tp
        return total

    def _layer_bytes(
        self, width: int, kept: Sequence[int], in_flight: float, tp: int, is_cut: bool, recompute: bool
    ) -> float:
        """Bytes per token of layers whose attentions keep so many numbers, for the micro batches in flight."""
        whole_width = width / tp if is_cut else width
        layers = [self.size * (5 * whole_width + (8 * width + numbers) / tp) for numbers in kept]
        if recompute:
            return in_flight * len(layers) * self.size * whole_width + max(layers, default=0)
        return in_flight * sum(layers)
