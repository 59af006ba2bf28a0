"""The layers of a decoder as CUDA graphs: all kernels between two attentions are launched at once.

Every bin has the same number of tokens, so outside its attention a layer runs the same kernels on the same shapes for
every bin. Launching these kernels one by one can take the host longer than the device needs to run them, above all on
slow hosts and with tensor parallelism. Attention itself, whose shapes depend on the samples of the bin, stays outside
the graphs.

    section 0           norm, projection, rotation of layer 0
    section 1, 2, ...   the rest of a layer and the beginning of the next, or only one of them if the caller intervenes

After the last attention only tokens with loss are computed. Their number differs between bins, so that part has no
graph.

Each section is one graph for forward and one for backward. The graphs work on tensors at fixed addresses: the outputs
of a section are the inputs of the next, and all share one memory pool, which holds the activations of one micro batch
from its forward to its backward pass. A pipeline has several micro batches between these passes, and captures a slot
for each of them: a set of graphs with a pool of its own. There is no recomputation. The gradients of the weights are
summed into `main_grad` inside the graphs; torch's autograd sees none of them.

A layer that routes tokens to experts fits into a graph because its kernels read the numbers of rows on the device, and
ranks that divide the experts exchange equal numbers of tokens.

In a layer of the gated delta rule the rule, which also depends on the samples, replaces attention, and the rule's
projections replace q, k, v.

T = tokens of the bin on this rank, s = T / tp with sequence parallel, else T; D = hidden size; q, k, v as in
packed_layer.py.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from trainer.layers.packed_layer import PackedLayer
from trainer.layers.segments import PackedSegments, ResultBuffers, Rotation, RoutedTokens, joined
from trainer.libraries.torch_private import parameters_of

ALIGNED = 16  # numbers: for strides that are no multiples of 16, Triton compiles other code
WARMUPS = 2  # before a capture: in their first calls libraries choose kernels and allocate memory


class GraphSection:
    """The computation between two attentions.

    Args:
        after: the layer whose attention comes before; None at the beginning of a chain.
        before: the layer whose attention comes next; None if the caller intervenes after this section.
        rotation: the rotation of the whole bin, in the tensors that `run` reads.
        routed: the tokens of the bin, in the tensors that `run` reads; None if no layer routes tokens.
    """

    def __init__(
        self,
        after: PackedLayer | None,
        before: PackedLayer | None,
        rotation: Rotation,
        routed: RoutedTokens | None = None,
    ) -> None:
        self.after, self.before, self.rotation, self.routed = after, before, rotation, routed
        modules = after.modules_after_attention() if after else []
        modules = [*modules, *(before.modules_before_attention() if before else [])]
        params = itertools.chain.from_iterable(module.parameters() for module in modules)
        self.trained = [param for param in params if param.requires_grad]
        inner = itertools.chain.from_iterable(module.modules() for module in modules)
        self._fused = {id(x.weight) for x in inner if getattr(x, "fuse_wgrad_accumulation", False)}
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def is_captured(self) -> bool:
        """Whether the graphs, and so the tensors that they read and write, exist."""
        return bool(self._graphs)

    def run(self, hidden: torch.Tensor, *attended: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Map (s, 1, D) and the previous attention's output to (s, 1, D) and the next attention's q, k, v."""
        delta = None
        if self.after:
            hidden, delta = self.after.after_attention(hidden, *attended, routed=self.routed)
        if self.before is None:
            return (hidden + delta,)
        return self.before.before_attention(hidden, self.rotation, delta)

    def capture_forward(self, pool: tuple[int, int], hidden: torch.Tensor, *attended: torch.Tensor) -> None:
        """Capture the forward pass on these input tensors; `outputs` then holds the output tensors."""
        self.inputs = [x.detach().requires_grad_() for x in (hidden, *attended)]
        with self._capturing(pool):
            self.outputs = self.run(*self.inputs)

    def capture_backward(self, pool: tuple[int, int], grads: Sequence[torch.Tensor]) -> None:
        """Capture the backward pass of the captured forward pass; it reads the outputs' gradients from `grads`."""
        self.grad_outputs = list(grads)
        with self._capturing(pool):
            self.grad_inputs = self._backward(self.outputs)
        self.outputs = [x.detach() for x in self.outputs]

    def warm_up(self, *inputs: torch.Tensor) -> None:
        """Run forward and backward outside a graph. The gradients are zero, so `main_grad` keeps its values."""
        self.inputs = [x.detach().requires_grad_() for x in inputs]
        for _ in range(WARMUPS):
            outputs = self.run(*self.inputs)
            self.grad_outputs = [torch.zeros_like(x) for x in outputs]
            self._backward(outputs)

    def replay_forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for these inputs, in the captured output tensors."""
        _put(self.inputs, inputs)
        self._graphs[0].replay()
        return [x.detach() for x in self.outputs]

    def replay_backward(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the inputs, in the captured tensors; add the weights' gradients to `main_grad`."""
        _put(self.grad_outputs, grads)
        self._graphs[1].replay()
        return [x.detach() for x in self.grad_inputs]

    def release(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs = []

    def _capturing(self, pool: tuple[int, int]) -> torch.cuda.graph:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads may call CUDA meanwhile: NCCL's watchdog does.
        return torch.cuda.graph(self._graphs[-1], pool=pool, capture_error_mode="thread_local")

    def _backward(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for param in self.trained:
            param.grad_added_to_main_grad = False
        grads = torch.autograd.grad(outputs, [*self.inputs, *self.trained], self.grad_outputs, allow_unused=True)
        for param, grad in zip(self.trained, grads[len(self.inputs) :]):
            # A fused matrix product has added the gradient if it says so, or if it gives none: where its input is
            # computed again (recompute.py), it sees a copy of the weight, on which it finds no place to say so.
            if param.grad_added_to_main_grad or (grad is None and id(param) in self._fused):
                continue
            param.main_grad.add_(grad)
        return list(grads[: len(self.inputs)])


def divide_into_sections(
    layers: Sequence[PackedLayer], num_interrupted: int, rotation: Rotation, routed: RoutedTokens | None = None
) -> list[GraphSection]:
    """Divide the layers into sections, up to the last attention. The caller intervenes after each of the first
    `num_interrupted` layers, never after the last."""
    sections = [GraphSection(None, layers[0], rotation, routed)]
    for number, (layer, following) in enumerate(itertools.pairwise(layers)):
        if number < num_interrupted:
            sections += [GraphSection(layer, None, rotation, routed), GraphSection(None, following, rotation, routed)]
        else:
            sections.append(GraphSection(layer, following, rotation, routed))
    return sections


class Slot:
    """The graphs of one micro batch between its forward and its backward pass, with their memory."""

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        rotation: Rotation,
        num_interrupted: int,
        routed: RoutedTokens | None = None,
    ) -> None:
        config, num_tokens = layers[0].config, len(rotation.cos)
        # The slot has tensors of its own at fixed addresses; `put` sets them.
        self.rotation = Rotation(*(torch.zeros_like(angles) for angles in rotation))
        self.routed = routed and dataclasses.replace(routed, is_token=torch.ones_like(routed.is_token))
        self.sections = divide_into_sections(layers, num_interrupted, self.rotation, self.routed)
        rows = num_tokens // config.tensor_model_parallel_size if config.sequence_parallel else num_tokens
        self._hidden = rotation.cos.new_zeros(rows, 1, config.hidden_size, dtype=config.params_dtype)

    def put(self, rotation: Rotation, routed: RoutedTokens | None) -> None:
        """Set the rotation and the tokens that the next replay reads."""
        for place, angles in zip(self.rotation, rotation):
            place.copy_(angles)
        if self.routed is not None:
            self.routed.is_token.copy_(routed.is_token)

    def release(self) -> None:
        for section in self.sections:
            section.release()

    def _attended_of(self, section: GraphSection) -> list[torch.Tensor]:
        """Return zeros for the output of the attention before a section, (T, 1, h * d), or an empty list."""
        if section.after is None:
            return []
        return [self._hidden.new_zeros(len(self.rotation.cos), 1, section.after.attended_width)]

    def capture(self) -> None:
        """Warm up, and capture every section."""
        stream = torch.cuda.Stream()  # torch wants the calls before a capture on a side stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for section in self.sections:
                section.warm_up(self._hidden, *self._attended_of(section))
        torch.cuda.synchronize()
        self._capture()

    def _capture(self) -> None:
        # In the order of the replays: graphs that share a memory pool need it.
        pool = torch.cuda.graph_pool_handle()
        hidden = self._hidden
        for section in self.sections:
            # If the caller intervenes, its result is copied to a separate tensor.
            hidden = hidden if section.after else torch.zeros_like(hidden)
            section.capture_forward(pool, hidden, *self._attended_of(section))
            hidden = section.outputs[0]
        following: GraphSection | None = None
        # Gradients of q, k and v are used before the next section writes its own: layers of one kind share tensors.
        shared: dict[tuple[torch.Size, ...], list[torch.Tensor]] = {}
        for section in reversed(self.sections):
            qkv = section.outputs[1:]
            kind = tuple(x.shape for x in qkv)
            if kind not in shared:
                shared[kind] = _memory_like(qkv)
            chained = following is not None and following.after is not None
            grad = following.grad_inputs[0] if chained else torch.empty_like(section.outputs[0])
            section.capture_backward(pool, [grad, *shared[kind]])
            following = section


class LayerGraphs:
    """The layers of a decoder as graphs, from `capture` to `release`.

    NCCL does not end a communicator that a graph still uses: release the graphs before the process groups.

    Args:
        layers: on CUDA; their trained parameters have a `main_grad` of zeros.
        num_slots: micro batches at a time between their forward and backward passes, which come in the same order.
    """

    def __init__(
        self,
        layers: Sequence[PackedLayer],
        rotation: Rotation,
        num_interrupted: int,
        num_slots: int = 1,
        routed: RoutedTokens | None = None,
    ) -> None:
        self._layers = layers
        self._new_slot = lambda: Slot(layers, rotation, num_interrupted, routed)
        self._num_slots, self._next = num_slots, 0
        self.slots: list[Slot] = []

    def capture(self) -> None:
        """Capture every section of every slot. This is a collective if the layers communicate."""
        try:
            with _substitute_parameters(self._layers):
                for _ in range(self._num_slots):
                    self.slots.append(self._new_slot())
                    self.slots[-1].capture()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for slot in self.slots:
            slot.release()
        self.slots = []

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        segments: PackedSegments,
        between: Callable[[PackedLayer, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (s, 1, D) to the last layer's input (s, 1, D) and its attention's output (T, 1, h * d).

        At most `num_slots` forward passes may be without their backward pass. `between` is called with an interrupted
        layer and its output, and returns the next layer's input.
        """
        slot, self._next = self.slots[self._next], (self._next + 1) % len(self.slots)
        slot.put(rotation, segments.routed)
        if not hidden.requires_grad and any(section.trained for section in slot.sections):
            # Autograd sees only a replay's inputs: if none needed a gradient, the weights would get none.
            hidden = hidden.detach().requires_grad_()
        qkv: Sequence[torch.Tensor] = ()
        last: GraphSection | None = None  # the last section that gave queries, keys and values
        for section in slot.sections:
            attended = [_attend(last, section, *qkv, segments=segments)] if section.after else []
            hidden, *qkv = _Replay.apply(section, hidden, *attended)
            if section.before is None:
                hidden = between(section.after, hidden)
            else:
                last = section
        return hidden, _attend(last, None, *qkv, segments=segments)


def _attend(
    source: GraphSection, target: GraphSection | None, *qkv: torch.Tensor, segments: PackedSegments
) -> torch.Tensor:
    """Return the output of the attention between two sections, (T, 1, h * d)."""
    if source.is_captured:
        # Its kernels write into the tensors that the sections read.
        segments.buffers = ResultBuffers(None if target is None else target.inputs[1].detach(), source.grad_outputs[1:])
    try:
        return source.before.attend(*qkv, segments)
    finally:
        segments.buffers = None  # they were for this attention alone


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, section, *inputs):
        ctx.section = section
        return tuple(section.replay_forward(inputs))

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.section.replay_backward(grads)


@contextlib.contextmanager
def _substitute_parameters(layers: Sequence[PackedLayer]) -> Iterator[None]:
    """Replace the layers' parameters inside the context by others with the same memory and the same `main_grad`."""
    modules = [module for layer in layers for module in layer.modules()]
    held = [parameters_of(module) for module in modules]
    places = [(parameters, name, param) for parameters in held for name, param in parameters.items()]
    places = [(parameters, name, param) for parameters, name, param in places if param is not None]
    for parameters, name, param in places:
        # Data parallelism holds the autograd nodes of the real parameters. These nodes wait for the stream on which
        # they were created, and a stream that is being captured may not wait.
        parameters[name] = torch.nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        parameters[name].__dict__.update(param.__dict__)
    try:
        yield
    finally:
        for parameters, name, param in places:
            parameters[name] = param


def _memory_like(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return memory for tensors of the same shapes. Slices of the rows of one tensor get such slices again, if Triton
    compiles for these what it compiles for tensors of their own: else sums would differ in their last bits."""
    whole = joined(tensors)
    if whole is not None and not any(x.size(1) % ALIGNED for x in tensors):
        return torch.empty_like(whole).split([x.size(1) for x in tensors], dim=1)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _put(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its target, unless both share the same memory."""
    for place, tensor in zip(places, tensors, strict=True):
        if place.data_ptr() != tensor.data_ptr():
            place.detach().copy_(tensor)
