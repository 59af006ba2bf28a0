"""Output layer and cross entropy, forward and backward: memory, time and error of the trainer's and of plain ones.

    python -m tests.bench.bench_output_loss --rate
    python -m tests.bench.bench_output_loss --chunks 1024 2048 8192 --hidden 2048        # what the chunk's size costs
    python -m tests.bench.bench_output_loss --device cpu --vocabulary 1000 --tokens 300 --hidden 64 --chunks 128

One GPU, a world of one rank, bf16. Each way ends with the gradient of the hidden states and with the weight's added to
a float32 buffer, as a training step does: ours adds it there in the product, the others make it in bf16 and add.

    plain     megatron-core's ColumnParallelLinear, then its vocab_parallel_cross_entropy of float32 logits
    torch     the same linear, then torch's cross_entropy of float32 logits
    ours      trainer/layers/output_loss.py

Memory is the peak over what was there before: hidden states, labels, weight and buffer. Time by CUDA events, median
after three calls. Errors are relative to the same in float64, in L2 norm.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

from tests.bench.host import describe
from tests.helpers.single_rank import single_rank
from trainer.layers import output_loss
from trainer.layers.output_loss import OutputLayer

WARMUP = 3
GB = 1e9
Losses = Callable[[torch.Tensor, torch.Tensor, torch.nn.Parameter], torch.Tensor]


def layer_of(kind: type, weight: torch.Tensor, group: ProcessGroup) -> torch.nn.Module:
    """Return an output layer with the given weight."""
    words, size = weight.shape
    config = TransformerConfig(num_layers=1, hidden_size=size, num_attention_heads=1, perform_initialization=False)
    options = {"bias": False, "skip_weight_param_allocation": True, "tp_group": group}
    return kind(size, words, config=config, init_method=lambda _: None, **options)


def ways(weight: torch.Tensor, group: ProcessGroup, chunks: list[int]) -> Iterator[tuple[str, Losses]]:
    """Return name -> function of (hidden (N, D), labels (N,), weight) -> losses (N,)."""
    linear, layer = (layer_of(kind, weight, group) for kind in (ColumnParallelLinear, OutputLayer))
    layer.fuse_wgrad_accumulation = True

    def plain(hidden, labels, weight):
        logits = linear(hidden[:, None], weight=weight)[0]
        return vocab_parallel_cross_entropy(logits.float(), labels[:, None])[:, 0]

    def by_torch(hidden, labels, weight):
        return F.cross_entropy(linear(hidden[:, None], weight=weight)[0][:, 0].float(), labels, reduction="none")

    yield "plain", plain
    yield "torch", by_torch
    for chunk in chunks:

        def ours(hidden, labels, weight, chunk=chunk):
            output_loss.CHUNK = chunk
            return layer(hidden, labels, weight)

        yield f"ours, chunks of {chunk:,}", ours


def draw(tokens: int, words: int, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return hidden states as a norm gives them, an initial weight, labels, and the buffer."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, device=device).bfloat16().requires_grad_()
    weight = torch.nn.Parameter((0.02 * torch.randn(words, size, generator=generator, device=device)).bfloat16())
    weight.main_grad = torch.zeros(words, size, device=device)
    return hidden, torch.randint(words, (tokens,), generator=generator, device=device), weight


def backward(losses: torch.Tensor, weight: torch.nn.Parameter) -> None:
    """Run the backward pass as a step does: megatron-core's hook adds the returned gradient to the buffer."""
    losses.sum().backward()
    if weight.grad is not None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None


def truth(hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return losses and gradients in float64, computed row by row."""
    weight = weight.detach().double()
    grad_weight = torch.zeros_like(weight)
    losses, grad_hidden = [], []
    for rows, targets in zip(hidden.detach().split(512), labels.split(512), strict=True):
        logits = rows.double() @ weight.t()
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        grad = logits.softmax(-1)
        grad[torch.arange(len(rows), device=rows.device), targets] -= 1
        grad_hidden.append(grad @ weight)
        grad_weight.addmm_(grad.t(), rows.double())
    return torch.cat(losses), torch.cat(grad_hidden), grad_weight


def errors(way: Losses, inputs: tuple[torch.Tensor, ...], true: tuple[torch.Tensor, ...]) -> list[float]:
    """Return the relative errors of the losses, of the hidden states' gradient and of the weight's gradient."""
    hidden, labels, weight = inputs
    hidden.grad = None
    weight.main_grad.zero_()
    losses = way(hidden, labels, weight)
    backward(losses, weight)
    found = (losses.detach(), hidden.grad, weight.main_grad)
    return [float((mine - exact).norm() / exact.norm()) for mine, exact in zip(found, true, strict=True)]


def _now(device: torch.device) -> object:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: object, stop: object) -> float:
    return 1e3 * (stop - start) if isinstance(start, float) else start.elapsed_time(stop)


def measure(way: Losses, inputs: tuple[torch.Tensor, ...], repeats: int) -> tuple[float, float, float]:
    """Return (GB at the peak over the inputs, ms forward, ms backward)."""
    hidden, labels, weight = inputs
    on_gpu, marks = hidden.is_cuda, []
    for number in range(WARMUP + repeats):
        hidden.grad = None
        if on_gpu and number == WARMUP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = _now(hidden.device)
        losses = way(hidden, labels, weight)
        middle = _now(hidden.device)
        backward(losses, weight)
        marks.append((start, middle, _now(hidden.device)))
        del losses
    if on_gpu:
        torch.cuda.synchronize()
    times = [(_milliseconds(a, b), _milliseconds(b, c)) for a, b, c in marks[WARMUP:]]
    peak = (torch.cuda.max_memory_allocated() - before) / GB if on_gpu else float("nan")
    return peak, *(statistics.median(column) for column in zip(*times, strict=True))


def product_rate(device: torch.device, size: int = 8192) -> float:
    """Return the TFLOP/s of a bf16 matrix product on this host."""
    a = torch.randn(size, size, device=device).bfloat16()
    marks = []
    for _ in range(20):
        start = _now(device)
        a @ a
        marks.append((start, _now(device)))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 2 * size**3 / statistics.median(_milliseconds(*pair) for pair in marks[5:]) / 1e9


def bench(tokens: int, size: int, args: argparse.Namespace, group: ProcessGroup) -> None:
    """Print the rows of one size."""
    inputs = draw(tokens, args.vocabulary, size, args.device)
    true = truth(*inputs)
    found = {name: errors(way, inputs, true) for name, way in ways(inputs[2], group, args.chunks)}
    del true
    for name, way in ways(inputs[2], group, args.chunks):
        try:
            peak, ahead, back = measure(way, inputs, args.repeats)
        except torch.OutOfMemoryError:
            print(f"| {size:,} | {tokens:,} | {name} | out of memory | | | | | | |", flush=True)
            continue
        shown = " | ".join(f"{error:.2e}" for error in found[name])
        cells = f"{peak:.2f} | {ahead:.2f} | {back:.2f} | {ahead + back:.2f}"
        print(f"| {size:,} | {tokens:,} | {name} | {cells} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_458, 16_384], help="loss tokens")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2_048, 4_096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[output_loss.CHUNK], help="loss tokens at a time")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rate", action="store_true", help="first print the rate of an 8192^3 product")
    args = parser.parse_args()
    with single_rank() as mesh:
        if args.rate:
            print(f"8192^3 bf16: {product_rate(args.device):.0f} TFLOP/s\n")
        print(f"Vocabulary {args.vocabulary:,}, bf16; {', '.join(describe())}\n")
        columns = "peak GB | forward ms | backward ms | both ms | error: losses | hidden | weight"
        print(f"| hidden | loss tokens | | {columns} |")
        print("| ---: | ---: | --- |" + " ---: |" * 7)
        for size in args.hidden:
            for tokens in args.tokens:
                bench(tokens, size, args, mesh.groups.tp)


if __name__ == "__main__":
    main()
