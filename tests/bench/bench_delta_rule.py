"""The gated delta net's kernels on one GPU: the delta rule alone, the convolution, and the whole layer without
projections.

    python -m tests.bench.bench_delta_rule [--peer] [--shapes 2b 9b 27b]

A bin of 16,384 tokens, compared with the rates that the host's matrix unit and memory reach. With --peer also
flash-linear-attention, if it is installed. Its gated backward pass is wrong or refused on Hopper with Triton 3.4 to
3.7.0,
so only its time counts.
"""

import itertools
import random
from collections.abc import Callable

import torch
from triton.testing import do_bench

from tests.bench.command import make_parser
from tests.bench.host import describe
from trainer.data.packed_chunks import PackedChunks
from trainer.parts.delta.rule import plain
from trainer.parts.delta.rule.convolution import convolve_heads
from trainer.parts.delta.rule.gated_delta_net import DeltaHeads, DeltaParameters, gated_delta_net
from trainer.parts.delta.rule.gates import delta_gates
from trainer.parts.delta.rule.kernels import gated_delta_rule

TOKENS = 16_384
SHAPES = {"2b": DeltaHeads(16, 16, 128), "9b": DeltaHeads(16, 32, 128), "27b": DeltaHeads(16, 48, 128)}


def bins() -> dict[str, list[int]]:
    """Return the lengths of a bin's segments."""
    draw, mixed = random.Random(0), []
    while sum(mixed) < TOKENS:
        mixed.append(min(draw.randint(100, 4000), TOKENS - sum(mixed)))
    return {"mixed": mixed, "22x745": [745] * 21 + [TOKENS - 21 * 745], "one": [TOKENS]}


def median_us(function: Callable[[], object], rep: int = 40) -> float:
    return 1e3 * do_bench(function, warmup=10, rep=rep, return_mode="median")


def both(function: Callable[[], torch.Tensor], inputs: list[torch.Tensor], gradient: torch.Tensor) -> float:
    return median_us(lambda: torch.autograd.grad(function(), inputs, gradient))


def layer_inputs(heads: DeltaHeads) -> list[torch.Tensor]:
    """Return mixed, z, b, a, conv weight, A_log, dt_bias, norm weight."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    narrow = [drawn(TOKENS, heads.value) for _ in range(2)]
    a_log = torch.rand(heads.value, device="cuda").mul(15).add(1).log()
    dt_bias = torch.full((heads.value,), -4.0, device="cuda")
    wide = [drawn(TOKENS, sum(heads.widths)), drawn(TOKENS, heads.widths[2])]
    inputs = [*wide, *narrow, 0.5 * drawn(sum(heads.widths), 4), a_log, dt_bias, torch.ones_like(drawn(heads.dim))]
    return [x.requires_grad_() for x in inputs]


def rates(heads: DeltaHeads) -> tuple[float, float]:
    """Return the operations of the rule's forward pass by the chunk formulas, and its bytes if each number were moved
    once."""
    chunk, dim = 64, heads.dim
    per_chunk = 2 * chunk * dim * (5 * chunk + 3 * dim)
    operations = TOKENS / chunk * heads.value * per_chunk
    return operations, 2 * TOKENS * dim * (2 * heads.key + 2 * heads.value)


def measure(heads: DeltaHeads, lengths: list[int]) -> dict[str, float]:
    """Return the microseconds of each part."""
    chunks = PackedChunks.of(list(itertools.accumulate(lengths, initial=0))).to("cuda")
    inputs = layer_inputs(heads)
    mixed, _, b, a, conv_weight, a_log, dt_bias, _ = inputs

    def convolve() -> tuple[torch.Tensor, ...]:
        return convolve_heads(mixed, conv_weight, chunks, (heads.key, heads.value, heads.dim))

    def layer(leaves: list[torch.Tensor]) -> torch.Tensor:
        return gated_delta_net(*leaves[:4], DeltaParameters(*leaves[4:]), heads, chunks)

    with torch.no_grad():
        rule_inputs = [*convolve(), *delta_gates(a, b, a_log, dt_bias, chunks)]
    rule_inputs = [x.detach().requires_grad_() for x in rule_inputs]
    gradient = torch.randn_like(rule_inputs[2])
    wide = gradient.flatten(1)
    parts = convolve()
    part_gradients = [torch.randn_like(x) for x in parts]
    times = {}
    with torch.no_grad():
        times["rule forward"] = median_us(lambda: gated_delta_rule(*rule_inputs, chunks))
        times["conv forward"] = median_us(convolve)
        times["layer forward"] = median_us(lambda: layer(inputs))
    times["rule both"] = both(lambda: gated_delta_rule(*rule_inputs, chunks), rule_inputs, gradient)
    times["rule both, states kept"] = both(lambda: gated_delta_rule(*rule_inputs, chunks, True), rule_inputs, gradient)
    backward = median_us(lambda: torch.autograd.grad(parts, [mixed, conv_weight], part_gradients, retain_graph=True))
    times["conv backward"] = backward
    times["layer both"] = both(lambda: layer(inputs), inputs, wide)
    return times


def torch_rule(heads: DeltaHeads, lengths: list[int]) -> dict[str, float]:
    """Return the time of the plain rule in float32 on the same GPU."""
    chunks = PackedChunks.of(list(itertools.accumulate(lengths, initial=0))).to("cuda")
    q, k = (torch.randn(TOKENS, heads.key, 128, device="cuda").mul(0.088).requires_grad_() for _ in range(2))
    v = torch.randn(TOKENS, heads.value, 128, device="cuda").requires_grad_()
    g = torch.rand(TOKENS, heads.value, device="cuda").mul(-0.1).requires_grad_()
    beta = torch.rand(TOKENS, heads.value, device="cuda").requires_grad_()
    inputs, gradient = [q, k, v, g, beta], torch.randn_like(v)
    with torch.no_grad():
        forward = median_us(lambda: plain.gated_delta_rule(*inputs, chunks), 20)
    return {"forward": forward, "both": both(lambda: plain.gated_delta_rule(*inputs, chunks), inputs, gradient)}


def peer(heads: DeltaHeads, lengths: list[int]) -> str:
    """Return the time of flash-linear-attention's rule, or the reason why it has none."""
    import fla
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    bounds = torch.tensor(list(itertools.accumulate(lengths, initial=0)), device="cuda")
    repeat = heads.value // heads.key if fla.__version__ < "0.5" else 1
    q, k = (torch.randn(1, TOKENS, heads.key * repeat, 128, device="cuda").mul(0.088) for _ in range(2))
    v = torch.randn(1, TOKENS, heads.value, 128, device="cuda")
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    g = torch.rand(1, TOKENS, heads.value, device="cuda").mul(-0.1).requires_grad_()
    beta = torch.rand(1, TOKENS, heads.value, device="cuda").requires_grad_()

    def rule() -> torch.Tensor:
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=bounds)[0]

    with torch.no_grad():
        forward = median_us(rule)
    try:
        whole = f"{both(rule, [q, k, v, g, beta], torch.randn_like(v)):,.0f}"
    except RuntimeError as error:
        whole = f"refused: {str(error)[:60]}"
    return f"fla {fla.__version__} rule forward {forward:,.0f}, both {whole}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    options = parser.parse_args()
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * 2**31 / median_us(lambda: target.copy_(source)) * 1e6
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / median_us(lambda: matrix @ matrix) * 1e6
    print(*describe(), sep=", ")
    print(f"{rate / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s; microseconds:")
    for shape, (name, lengths) in itertools.product(options.shapes, bins().items()):
        heads = SHAPES[shape]
        times = measure(heads, lengths)
        operations, moved = rates(heads)
        shares = [operations / times["rule forward"] * 1e6 / rate, moved / times["rule forward"] * 1e6 / bandwidth]
        print(f"{shape} {name}: " + ", ".join(f"{key} {value:,.0f}" for key, value in times.items()), end="")
        print("; forward {:.0%} of the matrix rate, {:.0%} of the bandwidth".format(*shares), flush=True)
        if shape == "2b" and name == "mixed":
            print(f"{shape} {name}: torch rule, float32:", torch_rule(heads, lengths), flush=True)
        if options.peer:
            print(f"{shape} {name}:", peer(heads, lengths), flush=True)


if __name__ == "__main__":
    main()
