"""The layers of a decoder as CUDA graphs: all that lies between two attentions is launched at once.

A bin has always the same number of tokens, so what a layer does outside its attention is the same kernels on the same
shapes for every bin. Launched one by one they keep the host busy, on slow hosts and with tensor parallelism for longer
than the device. Attention itself, whose shapes are the samples of the bin, stays outside the graphs.

    piece 0           norm, projection, rotation of layer 0
    piece 1, 2, ...   the rest of a layer and the beginning of the next, or one of them where something comes between

What follows the last attention is computed for the tokens that carry loss, whose number is each bin's own: no graph.

Each piece is a graph for forward and one for backward. They work on tensors at fixed places: the outputs of a piece are
the inputs of the next, and all share one pool of memory, in which the activations of one micro batch live from its
forward to its backward pass. Hence one micro batch at a time (no pipeline parallelism), and nothing is recomputed.
The gradients of the weights are summed into `main_grad` inside the graphs; torch's autograd sees none of them.

T = tokens of the bin on this rank, s = T / tp with sequence parallel, else T; D = hidden size; q, k, v as in layer.py.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from trainer.models.attention import PackedSegments, Rotation
from trainer.models.layer import PackedLayer

WARMUPS = 2  # before a capture: libraries choose and allocate in their first calls


class Piece:
    """What lies between two attentions.

    Args:
        after: the layer whose attention comes before, None at the beginning of a chain.
        before: the layer whose attention comes next, None where the caller comes between.
        rotation: of the whole bin; the places that `run` reads.
    """

    def __init__(self, after: PackedLayer | None, before: PackedLayer | None, rotation: Rotation) -> None:
        self.after, self.before, self.rotation = after, before, rotation
        used = [after.self_attention.linear_proj, after.pre_mlp_layernorm, after.mlp] if after else []
        if before:
            attention = before.self_attention
            used += [before.input_layernorm, attention.linear_qkv, attention.q_layernorm, attention.k_layernorm]
        params = itertools.chain.from_iterable(module.parameters() for module in used if module is not None)
        self._params = [param for param in params if param.requires_grad]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def run(self, hidden: torch.Tensor, *attended: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(s, 1, D), and what the attention before gave -> (s, 1, D), and q, k, v of the attention that comes next."""
        if self.after:
            hidden = self.after.after_attention(hidden, *attended)
        qkv = self.before.before_attention(hidden, self.rotation) if self.before else ()
        return hidden, *qkv

    def capture_forward(self, pool: tuple[int, int], hidden: torch.Tensor, *attended: torch.Tensor) -> None:
        """Capture the forward pass on these places; the outputs' places are then in `outputs`."""
        self.inputs = [x.detach().requires_grad_() for x in (hidden, *attended)]
        with self._capturing(pool):
            self.outputs = self.run(*self.inputs)

    def capture_backward(self, pool: tuple[int, int], grads: Sequence[torch.Tensor]) -> None:
        """Capture the backward pass of the captured forward pass, gradients of the outputs at these places."""
        self.grad_outputs = list(grads)
        with self._capturing(pool):
            self.grad_inputs = self._backward(self.outputs)
        self.outputs = [x.detach() for x in self.outputs]

    def warm_up(self, *inputs: torch.Tensor) -> None:
        """Forward and backward outside a graph, with gradients of zero: `main_grad` keeps its values."""
        self.inputs = [x.detach().requires_grad_() for x in inputs]
        for _ in range(WARMUPS):
            outputs = self.run(*self.inputs)
            self.grad_outputs = [torch.zeros_like(x) for x in outputs]
            self._backward(outputs)

    def replay_forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for these inputs, in their places."""
        _put(self.inputs, inputs)
        self._graphs[0].replay()
        return [x.detach() for x in self.outputs]

    def replay_backward(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the inputs, in their places; those of the weights are added to `main_grad`."""
        _put(self.grad_outputs, grads)
        self._graphs[1].replay()
        return [x.detach() for x in self.grad_inputs]

    def release(self) -> None:
        """Give up what was captured."""
        for graph in self._graphs:
            graph.reset()
        self._graphs = []

    def _capturing(self, pool: tuple[int, int]) -> torch.cuda.graph:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads may call CUDA meanwhile: NCCL's looks after its operations.
        return torch.cuda.graph(self._graphs[-1], pool=pool, capture_error_mode="thread_local")

    def _backward(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for param in self._params:
            param.grad_added_to_main_grad = False
        wanted = [*self.inputs, *self._params]
        grads = torch.autograd.grad(outputs, wanted, self.grad_outputs)
        for param, grad in zip(self._params, grads[len(self.inputs) :]):
            if not param.grad_added_to_main_grad:  # a matrix product adds to it by itself and says so
                param.main_grad.add_(grad)
        return list(grads[: len(self.inputs)])


def plan_pieces(layers: Sequence[PackedLayer], interrupted: frozenset[int], rotation: Rotation) -> list[Piece]:
    """The layers in pieces, up to the last attention.

    Args:
        interrupted: numbers of the layers, from 0 and without the last, after which the caller does something of its
            own.
    """
    pieces = [Piece(None, layers[0], rotation)]
    for number, (layer, following) in enumerate(itertools.pairwise(layers)):
        if number in interrupted:
            pieces += [Piece(layer, None, rotation), Piece(None, following, rotation)]
        else:
            pieces.append(Piece(layer, following, rotation))
    return pieces


class LayerGraphs:
    """The layers of a decoder as graphs, from `capture` to `release`.

    NCCL ends no communicator that a graph still uses: release them before the process groups.

    Args:
        layers: on CUDA; those of their parameters that are trained have a `main_grad`, of zeros.
        num_tokens: T.
        interrupted: see `plan_pieces`.
    """

    def __init__(self, layers: Sequence[PackedLayer], num_tokens: int, interrupted: frozenset[int]) -> None:
        config, like = layers[0].config, next(layers[0].parameters())
        self.rotation = Rotation.of(torch.zeros(num_tokens, config.kv_channels // 2, device=like.device))
        rows = num_tokens // config.tensor_model_parallel_size if config.sequence_parallel else num_tokens
        width = config.num_attention_heads // config.tensor_model_parallel_size * config.kv_channels
        self._hidden = like.new_zeros(rows, 1, config.hidden_size)
        self._attended = like.new_zeros(num_tokens, 1, width)
        self._layers, self._interrupted = layers, interrupted
        self.pieces: list[Piece] = []

    def capture(self) -> None:
        """Capture every piece; a collective where the layers communicate."""
        try:
            with _stand_ins(self._layers):
                self.pieces = plan_pieces(self._layers, self._interrupted, self.rotation)
                self._warm_up()
                self._capture()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give up the graphs and their memory."""
        for piece in self.pieces:
            piece.release()
        self.pieces = []

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        segments: PackedSegments,
        between: Callable[[PackedLayer, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(s, 1, D) -> what the last layer goes on with after its attention, (s, 1, D) and (T, 1, h * d); once forward
        and then once backward.

        Args:
            between: called with an interrupted layer and its output; makes the next layer's input.
        """
        for place, angles in zip(self.rotation, rotation):
            place.copy_(angles)
        qkv: Sequence[torch.Tensor] = ()
        for piece in self.pieces:
            attended = [piece.after.self_attention.attend(*qkv, segments)] if piece.after else []
            hidden, *qkv = _Replay.apply(piece, hidden, *attended)
            if piece.before is None:
                hidden = between(piece.after, hidden)
        return hidden, self._layers[-1].self_attention.attend(*qkv, segments)

    def _warm_up(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for piece in self.pieces:
                piece.warm_up(self._hidden, *([self._attended] if piece.after else []))
        torch.cuda.synchronize()

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        hidden = self._hidden
        for piece in self.pieces:
            # Where the caller comes between, what it makes is copied to a place of its own.
            hidden = hidden if piece.after else torch.zeros_like(hidden)
            piece.capture_forward(pool, hidden, *([torch.zeros_like(self._attended)] if piece.after else []))
            hidden = piece.outputs[0]
        following: Piece | None = None
        shared: list[torch.Tensor] = []  # gradients of q, k and v are used up before the next are made
        for piece in reversed(self.pieces):
            shared = shared or [torch.empty_like(x) for x in piece.outputs[1:]]
            chained = following is not None and following.after is not None
            grad = following.grad_inputs[0] if chained else torch.empty_like(piece.outputs[0])
            piece.capture_backward(pool, [grad, *(shared if piece.before else [])])
            following = piece


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, *inputs):
        ctx.piece = piece
        return tuple(piece.replay_forward(inputs))

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.piece.replay_backward(grads)


@contextlib.contextmanager
def _stand_ins(layers: Sequence[PackedLayer]) -> Iterator[None]:
    """Parameters of their own for the layers meanwhile, in the same memory, with the same `main_grad`.

    Data parallelism holds autograd's nodes of the real ones, which wait for the stream they were made on; a stream that
    is being captured may not.
    """
    modules = [module for layer in layers for module in layer.modules()]
    places = [(module._parameters, name, param) for module in modules for name, param in module._parameters.items()]
    places = [(held, name, param) for held, name, param in places if param is not None]
    for held, name, param in places:
        held[name] = torch.nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        held[name].__dict__.update(param.__dict__)
    try:
        yield
    finally:
        for held, name, param in places:
            held[name] = param


def _put(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy what is not in its place already."""
    for place, tensor in zip(places, tensors, strict=True):
        if place.data_ptr() != tensor.data_ptr():
            place.detach().copy_(tensor)
