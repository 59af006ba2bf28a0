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
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

from tests.bench.host import between, describe, mark, matrix_rate
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
        start = mark(on_gpu)
        losses = way(hidden, labels, weight)
        middle = mark(on_gpu)
        backward(losses, weight)
        marks.append((start, middle, mark(on_gpu)))
        del losses
    if on_gpu:
        torch.cuda.synchronize()
    times = [(1e3 * between(a, b), 1e3 * between(b, c)) for a, b, c in marks[WARMUP:]]
    peak = (torch.cuda.max_memory_allocated() - before) / GB if on_gpu else float("nan")
    return peak, *(statistics.median(column) for column in zip(*times, strict=True))


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
    parser.add_argument("--rate", action="store_true", help="first print the rate of a matrix product")
    args = parser.parse_args()
    with single_rank() as mesh:
        if args.rate:
            product, at_once, sustained = matrix_rate()
            print(f"{product}: {at_once / 1e12:.0f} TFLOP/s at once, {sustained / 1e12:.0f} sustained\n")
        print(f"Vocabulary {args.vocabulary:,}, bf16; {', '.join(describe())}\n")
        columns = "peak GB | forward ms | backward ms | both ms | error: losses | hidden | weight"
        print(f"| hidden | loss tokens | | {columns} |")
        print("| ---: | ---: | --- |" + " ---: |" * 7)
        for size in args.hidden:
            for tokens in args.tokens:
                bench(tokens, size, args, mesh.groups.tp)


if __name__ == "__main__":
    main()
