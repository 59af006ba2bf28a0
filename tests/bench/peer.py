"""transformers on the samples of the training benches: whole optimizer steps, micro batches padded to the longest.

What is in its favour: micro batches are collated, normalised to bf16 and pinned before the clock; weights and Adam's
moments are bf16 (ours keeps float32 ones). As everyone has it: sdpa, logits at all positions, transformers' own loss
over the loss tokens of the global batch, gradients clipped to 1, torch's fused AdamW, samples in shuffled order, each
once an epoch. torch's cuDNN attention is off: it plans anew for every new shape.
"""

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig
from transformers.utils.import_utils import is_flash_linear_attention_available

from dataset_builders.contracts.tokenized import PatchFormat, TokenizedSample
from tests.bench.host import wait_for_device
from tests.bench.mix import PAD_MULTIPLE, Mix
from tests.helpers.reference import PIXELS, reference_inputs
from trainer.contract.adapter import AdapterConfig
from trainer.data.micro_batch import Geometry
from trainer.data.reader import BinReader
from trainer.data.slices import RankSlice
from trainer.loop.metrics import peak_memory_gb
from trainer.model.shape import ImageTokens

LR = 1e-5
CLIP = 1.0
IGNORE_INDEX = -100  # label of a token that is not trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """The settings of a measurement.

    Attributes:
        micro_batches: samples of a micro batch; after one that does not fit, larger ones are left out.
        global_batch: samples between two updates.
        adapter: PEFT's settings, in the type of the weights; None trains the whole model.
        adapted: modules that have adapters.
        adapted_stacks: parameters of one matrix per expert that have adapters.
        recompute: whether it recomputes its layers in the backward pass.
    """

    micro_batches: tuple[int, ...]
    global_batch: int = 64
    steps: int = 6
    warmup: int = 2
    seq_len: int = 8192
    dtype: torch.dtype = torch.bfloat16
    adapter: AdapterConfig | None = None
    adapted: tuple[str, ...] = ()
    adapted_stacks: tuple[str, ...] = ()
    recompute: bool = False


@dataclass(slots=True, kw_only=True)
class PeerRow:
    """One size of micro batches. If it could not be measured, only `micro_batch` and `why` are set.

    Attributes:
        seconds: of each counted step.
        tokens: of each counted step, without padding.
        slots: of all counted steps, with padding.
        mix: the samples of the counted steps.
        loss: mean loss of the last counted global batch.
        why: why it could not be measured, mostly for lack of memory.
        delta_rule: whose gated delta rule was run; empty if the model has none.
    """

    micro_batch: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    slots: int = 0
    mix: Mix | None = None
    memory_gb: float = 0.0
    loss: float = float("nan")
    why: str = ""
    delta_rule: str = ""

    @property
    def fits(self) -> bool:
        return bool(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds) if self.fits else 0.0


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A micro batch in the form that transformers takes, with its contents."""

    inputs: dict[str, torch.Tensor]
    tokens: int
    loss_tokens: int

    @property
    def slots(self) -> int:
        return self.inputs["input_ids"].numel()


def collate(
    samples: Sequence[TokenizedSample],
    ids_of: PreTrainedConfig | ImageTokens,
    dtype: torch.dtype,
    pixels: PatchFormat = PIXELS,
) -> PaddedBatch:
    """Return (B, S) ids, attention mask, token types and labels, padded on the right to the longest sample, and (P, C)
    pixels of `dtype`.

    Labels are at the loss tokens alone, unshifted: transformers shifts them.
    """
    longest = max(len(sample.input_ids) for sample in samples)
    names = ("input_ids", "attention_mask", "mm_token_type_ids", "labels")
    padded = {name: torch.zeros(len(samples), longest, dtype=torch.int64) for name in names}
    padded["labels"].fill_(IGNORE_INDEX)
    images: dict[str, list[torch.Tensor]] = {"pixel_values": [], "image_grid_thw": []}
    for row, sample in enumerate(samples):
        inputs = reference_inputs(sample, ids_of, pixels)
        length = len(sample.input_ids)
        padded["input_ids"][row, :length] = inputs["input_ids"][0]
        padded["mm_token_type_ids"][row, :length] = inputs["mm_token_type_ids"][0]
        padded["attention_mask"][row, :length] = 1
        learnt = torch.from_numpy(sample.loss_mask.astype(bool))
        padded["labels"][row, :length][learnt] = inputs["input_ids"][0][learnt]
        for name, values in images.items():
            values += [inputs[name]] if name in inputs else []
    if images["pixel_values"]:
        padded["pixel_values"] = torch.cat([value.to(dtype) for value in images["pixel_values"]])
        padded["image_grid_thw"] = torch.cat(images["image_grid_thw"])
    loss_tokens = int((padded["labels"][:, 1:] != IGNORE_INDEX).sum())
    return PaddedBatch(padded, int(padded["attention_mask"].sum()), loss_tokens)


def read_samples(root: Path, seq_len: int) -> list[TokenizedSample]:
    """Return every training sample of the bins that `write_data` wrote, in their order."""
    config = AutoConfig.from_pretrained(root / "hf")
    vision = config.vision_config
    # Not by the trainer's read_config: megatron-core brings Transformer Engine into this process, and that a cuDNN of
    # its own, with which torch's convolutions would not work.
    geometry = Geometry(config.image_token_id, vision.spatial_merge_size, 3 * vision.patch_size**2)
    reader = BinReader(root / "data", root / "bins", "train", geometry, seq_len, RankSlice(pad_multiple=PAD_MULTIPLE))
    return [sample for number in range(len(reader.bins)) for sample in reader.samples(number)]


def shuffled(samples: Sequence[TokenizedSample], seed: int = 0) -> Iterator[TokenizedSample]:
    """Yield epoch after epoch without end, each in another order."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (samples[i] for i in rng.permutation(len(samples)))


def measure_peer(root: Path, plan: PeerPlan) -> list[PeerRow]:
    """Measure each size on the output of `write_model` and `write_data`, and print each result at once."""
    cuda = torch.cuda.is_available()
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = AutoModelForImageTextToText.from_pretrained(
        root / "hf", dtype=plan.dtype, attn_implementation="sdpa"
    ).train()
    model.to("cuda" if cuda else "cpu")
    if plan.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if plan.adapter is not None:
        model = _with_adapters(model, plan)
    samples = read_samples(root, plan.seq_len)
    rows: list[PeerRow] = []
    for size in plan.micro_batches:
        row = PeerRow(micro_batch=size, why="larger than one that could not be measured")
        rows.append(_try(model, samples, plan, size) if not rows or rows[-1].fits else row)
        row = rows[-1]
        row.delta_rule = _delta_rule(model)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(f"transformers, micro batch {size}: {row.tokens_per_second:,.0f} useful tokens/s {row.why}", flush=True)
    return rows


def _with_adapters(model, plan: PeerPlan):
    """Return PEFT's model without its copy of the adapters in float32, which is in transformers' favour."""
    config = LoraConfig(
        r=plan.adapter.rank,
        lora_alpha=plan.adapter.alpha,
        lora_dropout=plan.adapter.dropout,
        use_rslora=plan.adapter.rslora,
        use_dora=plan.adapter.kind == "dora",
        target_modules=list(plan.adapted),
        target_parameters=list(plan.adapted_stacks) or None,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _delta_rule(model) -> str:
    """Return whose gated delta rule is used. transformers takes flash-linear-attention's kernels if they are
    installed."""
    if "linear_attention" not in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return ""
    if model.device.type == "cuda" and is_flash_linear_attention_available():
        return f"flash-linear-attention {version('fla-core')}"
    return "transformers' own, in torch"


def _try(model, samples: Sequence[TokenizedSample], plan: PeerPlan, size: int) -> PeerRow:
    """Measure one size, or return why it could not be measured. No memory of the try outlives this call."""
    row = PeerRow(micro_batch=size)
    try:
        _measure(model, samples, plan, row)
    except RuntimeError as error:  # out of memory is such an error, and so are the errors that libraries make of it
        row = PeerRow(micro_batch=size, why=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    for param in model.parameters():
        param.grad = None
    return row


def _measure(model, samples: Sequence[TokenizedSample], plan: PeerPlan, row: PeerRow) -> None:
    trained = [param for param in model.parameters() if param.requires_grad]
    adam = torch.optim.AdamW(trained, lr=LR, weight_decay=0.1, fused=True)
    endless = shuffled(samples)
    counted: list[TokenizedSample] = []
    for step in range(plan.warmup + plan.steps):
        chosen = list(itertools.islice(endless, plan.global_batch))
        parts = [chosen[i : i + row.micro_batch] for i in range(0, len(chosen), row.micro_batch)]
        batches = [_pinned(part, model, plan.dtype) for part in parts]
        wait_for_device()
        start = time.perf_counter()
        loss = _update(model, adam, batches)
        wait_for_device()
        seconds = time.perf_counter() - start
        if step >= plan.warmup:
            counted += chosen
            row.seconds.append(seconds)
            row.tokens.append(sum(batch.tokens for batch in batches))
            row.slots += sum(batch.slots for batch in batches)
            row.loss = float(loss)
    row.mix, row.memory_gb = Mix.of(counted), peak_memory_gb()


def _pinned(samples: Sequence[TokenizedSample], model, dtype: torch.dtype) -> PaddedBatch:
    batch = collate(samples, model.config, dtype)
    if torch.cuda.is_available():
        batch.inputs.update({name: value.pin_memory() for name, value in batch.inputs.items()})
    return batch


def _update(model, adam: torch.optim.Optimizer, batches: Sequence[PaddedBatch]) -> torch.Tensor:
    """Do one optimizer step. Return the mean loss over the loss tokens of the global batch, on the device."""
    count = sum(batch.loss_tokens for batch in batches)
    total = torch.zeros((), device=model.device)
    for batch in batches:
        inputs = {name: value.to(model.device, non_blocking=True) for name, value in batch.inputs.items()}
        loss = model(**inputs, use_cache=False, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    adam.step()
    adam.zero_grad(set_to_none=True)
    return total
