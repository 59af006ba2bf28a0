"""How many parameters a model has and how much memory its training takes: from its facts alone, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.contract import ParallelConfig
from trainer.contract.model_facts import LOSS_CHUNK, ModelFacts

_TEMPORAL_PATCH_SIZE = 2
_MERGE_SIZE = 2


def facts_of_embedded(config: Mapping[str, Any]) -> ModelFacts:
    """From the settings of the embedded model."""
    same = ModelFacts.__dataclass_fields__.keys() & config.keys()
    return ModelFacts(
        **{name: config[name] for name in same},
        num_positions=config["position_grid"] ** 2,
        num_deepstack=len(config["deepstack_indexes"]),
    )


def count_from_facts(facts: ModelFacts) -> dict[str, int]:
    """Parameters of the vision encoder, the mergers and the language model; tied weights once."""
    d, width, inner = facts.hidden_size, facts.vision_hidden_size, facts.vision_intermediate_size
    language = facts.num_layers * _layer_parameters(facts) + d
    language += facts.vocab_size * d * (1 if facts.tie_word_embeddings else 2)
    patch = 3 * _TEMPORAL_PATCH_SIZE * facts.patch_size**2
    attention = (3 * width + 3) * width + (width + 1) * width
    block = 2 * 2 * width + attention + (width + 1) * inner + (inner + 1) * width
    vision = patch * width + width + facts.num_positions * width + facts.vision_depth * block
    merged = width * _MERGE_SIZE**2
    merger = (merged + 1) * merged + (merged + 1) * d
    mergers = merger + 2 * width + facts.num_deepstack * (merger + 2 * merged)
    return {"vision": vision, "merger": mergers, "language": language}


def _layer_parameters(facts: ModelFacts) -> int:
    d, queries, keys = facts.hidden_size, facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    return d * (2 * queries + 2 * keys) + 2 * facts.head_dim + 3 * d * facts.intermediate_size + 2 * d


def estimate_memory(
    facts: ModelFacts,
    parallel: ParallelConfig,
    *,
    dp: int,
    num_micro_batches: int,
    seq_len: int,
    max_patches: int,
    precision: str,
) -> dict[str, int]:
    """Bytes that the fullest process needs to train: the pipeline's first (embedding, vision) or its last (logits).

    Of P parameters on a process, with the distributed optimizer over n = dp x cp ranks: weights 4 P, or in bfloat16
    2 P and 4 P / n of float32 copies; gradients 4 P; AdamW's two moments 8 P / n. With fsdp (4 + 4 + 8) P / dp, less
    the layers that are gathered for the moment. P counts language matrices / tp, and vision whole unless
    vision_split=tensor_parallel. Without sharding these are exact.

    Activations are a rule of thumb for attention that keeps no score matrix (Korthikanti et al. 2022,
    arXiv:2205.05198, table 2): bytes a token, layer and unit of width in half precision are 10 + 24 / tp, with sequence
    parallel 34 / tp, when recomputed 2 and one layer more. Tokens are seq_len / cp; patches are max_patches / (tp x cp)
    when the images are dealt evenly, max_patches / cp with vision_split=tensor_parallel. All this is kept for every
    micro batch in flight; on the last process come the logits of one chunk of loss tokens, 4096 x vocabulary / tp at
    most. Qwen3-VL-2B in bins of 8,192 tokens and 25,300 patches: 77 GB by this; measured on an H200 were 70 GB with
    CUDA graphs and 80 without.

    Args:
        dp: data-parallel ranks.
        num_micro_batches: of a step, on each of them.
    """
    work = _Work(facts, parallel, dp, num_micro_batches, seq_len, max_patches, 4 if precision == "float32" else 2)
    return max((work.memory(rank) for rank in {0, parallel.pp - 1}), key=lambda parts: sum(parts.values()))


@dataclass(frozen=True, slots=True)
class _Work:
    facts: ModelFacts
    parallel: ParallelConfig
    dp: int
    num_micro_batches: int
    seq_len: int
    max_patches: int
    size: int  # bytes of a number in forward and backward

    def memory(self, rank: int) -> dict[str, int]:
        """Bytes of a pipeline rank, the first or the last."""
        parameters, shards = self._parameters(rank), self.dp * self.parallel.cp
        weights, gradients, moments = 4 * parameters, 4 * parameters, 8 * parameters / shards
        if self.parallel.sharding == "fsdp":
            weights, gradients = weights / shards, gradients / shards
        elif self.size == 2:
            weights = 2 * parameters + 4 * parameters / shards
        parts = {"weights": weights, "gradients": gradients, "optimizer": moments}
        return {name: round(value) for name, value in (parts | {"activations": self._activations(rank)}).items()}

    def _layers(self, rank: int) -> int:
        pp, first = self.parallel.pp, self.parallel.first_pipeline_layers
        if first is None:
            return self.facts.num_layers // pp
        return first if rank == 0 else (self.facts.num_layers - first) // (pp - 1)

    def _parameters(self, rank: int) -> float:
        facts, parallel = self.facts, self.parallel
        is_first, is_last = rank == 0, rank == parallel.pp - 1
        embeddings = is_first + is_last if parallel.pp > 1 or not facts.tie_word_embeddings else 1
        language = self._layers(rank) * _layer_parameters(facts) + facts.hidden_size * is_last
        language += embeddings * facts.vocab_size * facts.hidden_size
        counts = count_from_facts(facts)
        vision = (counts["vision"] + counts["merger"]) * is_first
        return language / parallel.tp + vision / (parallel.tp if parallel.vision_split == "tensor_parallel" else 1)

    def _activations(self, rank: int) -> float:
        facts, p = self.facts, self.parallel
        tokens, is_cut = self.seq_len / p.cp, p.sequence_parallel
        chunk_passes = 2 * (p.pp - 1 - rank) + (p.vpp - 1) * p.pp + 1 if p.vpp > 1 else p.pp - rank
        layers = self._layers(rank) * min(chunk_passes / p.vpp, self.num_micro_batches)
        kept = tokens * facts.hidden_size * self._per_layer(layers, p.tp, is_cut, p.recompute == "full")
        if rank == 0:
            in_flight = min(2 * p.pp - 1 if p.vpp > 1 else p.pp, self.num_micro_batches)
            tp = p.tp if p.vision_split == "tensor_parallel" else 1
            patches = self.max_patches / (p.cp * p.tp // tp)
            layers = facts.vision_depth * in_flight
            kept += patches * facts.vision_hidden_size * self._per_layer(layers, tp, False, p.recompute_vision)
        if rank == p.pp - 1:
            kept += self.size * min(tokens, LOSS_CHUNK) * facts.vocab_size / p.tp
        return kept

    def _per_layer(self, layers: float, tp: int, is_cut: bool, recompute: bool) -> float:
        """Bytes a token and unit of width, over so many layers."""
        whole = 17 * self.size / tp if is_cut else (5 + 12 / tp) * self.size
        return layers * self.size / (tp if is_cut else 1) + whole if recompute else layers * whole
