"""Qwen3-VL: the vision encoder in front of the language model.

The forward pass of a bin (`PackedModel.forward` in trainer/layers/packed_model.py), step by step:

1. Positions. `MicroBatch.position_ids` has a time, a row and a column of each token (trainer/data/); `rotation` makes
   one angle of each rotary pair from one of the three (`mrope_angles`, trainer/layers/segments.py).
2. Images, on the first pipeline rank (`encode`): patches are normalised, embedded, given learned positions, and pass
   through layers with full attention inside each image. A merger makes one image token of 2 x 2 patches; after some
   layers another merger makes the token's deepstack feature (trainer/parts/vision/module.py). A temporal group of a
   video, two frames, is an image whose patches are embedded with the weights of both frames.
3. Exchange. Ranks may share the images of a bin, so each gathers the image tokens of its own text
   (`gather_rows`, trainer/layers/gather.py); with images on other pipeline ranks or on ranks of their own, `exchange`
   brings them (trainer/parallel/vision/).
4. Embedding (`embed`): ids of tokens are looked up, and image tokens take the places of the image ids.
5. Layers (trainer/layers/packed_layer.py): a norm, attention (trainer/parts/attention/module.py), a norm, an MLP or
   experts (trainer/parts/mlp/, trainer/parts/experts/module.py). After layer i the deepstack feature i is added to
   the image tokens (`add_feature`, called by trainer/layers/decoder.py).
6. After the attention of the last layer only the tokens with loss go on (trainer/layers/segments.py): final norm,
   logits and cross entropy (trainer/layers/vocabulary.py).
7. Their sum and number are the loss (trainer/loop/loss.py).

The other families of vision-language models use this file too: they differ in the parts of their layers (step 5).

s = tokens of this rank's part of the sequence, V = image tokens among the s, D = hidden size, L = deepstack levels.
"""

from functools import partial

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from dataset_builders.contracts.tokenized import PatchFormat
from trainer.contract.parallel import ParallelConfig
from trainer.data.micro_batch import MicroBatch
from trainer.layers.decoder import Embedded
from trainer.layers.gather import gather_rows
from trainer.layers.packed_model import PackedModel
from trainer.layers.segments import Rotation, mrope_angles
from trainer.model.shape import VisionShape
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision.exchange import PipelineWorker, RemoteOwner, VisionOwner, Window, pipeline_links
from trainer.parts.vision.module import VisionEncoder, vision_config


def image_groups(groups: ProcessGroupCollection, parallel: ParallelConfig) -> tuple[ProcessGroup, ProcessGroup]:
    """Return the ranks that share the images of a bin, and the ranks that hold different tokens of the bin."""
    encoders = groups.tp_cp if parallel.vision_split == "images" else groups.cp
    users = groups.tp_cp if parallel.sequence_parallel else groups.cp
    return encoders, users


def build_encoder(
    shape: VisionShape, parallel: ParallelConfig, dtype: torch.dtype, modules: BackendSpecProvider, mesh: Mesh
) -> VisionEncoder:
    """Return the vision encoder of a rank; its weights are unset until they are loaded."""
    by_images = parallel.vision_split == "images"
    tp = mesh.alone if by_images else mesh.groups.tp
    groups = ProcessGroupCollection(tp=tp, cp=mesh.alone, pp=mesh.alone)
    config = vision_config(shape, parallel, dtype)
    sharded = parallel.sharding == "fsdp"
    encoder = VisionEncoder(config, shape, modules, groups, recompute=parallel.recompute_vision, sharded=sharded)
    if by_images:
        # The encoder is whole on every tensor-parallel rank, so the gradient norm must count it only once.
        for param in encoder.parameters():
            param.tensor_model_parallel = False
    return encoder


class Qwen3VLModel(PackedModel):
    """One chunk of the model. Level i of the deepstack features is added to the image tokens after layer i."""

    def build_parts(self, dtype: torch.dtype, modules: BackendSpecProvider) -> None:
        """Build the vision encoder on the first chunk; with shared images also on every other rank's first chunk."""
        is_dealt = self.parallel.deals_vision and not self.vp_stage
        if not (self.pre_process or is_dealt):
            return
        encoder = build_encoder(self.shape.vision, self.parallel, dtype, modules, self.mesh)
        if self.pre_process:
            self.vision = encoder
        pp, vpp, width = self.groups.pp, self.parallel.vpp, self.shape.feature_width
        if is_dealt:  # all ranks of the pipeline encode images
            encode, links, window = partial(self.encode, encoder), pipeline_links(pp), Window.of(pp.size(), vpp)
            if self.pre_process:
                self.exchange = VisionOwner(encoder, encode, links, range(1, pp.size()), window, width)
            else:
                messages = Window.of_messages(pp.size(), vpp, pp.rank())
                self.exchange = PipelineWorker(encoder, encode, links, [0], window, messages)
        elif self.parallel.vision_ranks:  # ranks that do nothing else encode images
            world, places = self.mesh.vision_world, self.groups.tp_cp
            workers, copies = world.workers_of(self.mesh.dp_rank, places.rank(), places.size(), self.mesh.dp)
            window = Window(0, sum(Window.of(pp.size(), vpp)))
            self.exchange = RemoteOwner(encoder, world.links, workers, copies, window, width)

    def rotation(self, batch: MicroBatch) -> Rotation:
        return Rotation.of(mrope_angles(batch.position_ids, self.shape.language))

    def prepare_pixels(self, patch_format: PatchFormat) -> None:
        encoders = [self.vision] if self.pre_process else [self.exchange.part["vision"]] if self.exchange else []
        for encoder in encoders:
            encoder.patch_embed.set_normalisation(patch_format.image_mean, patch_format.image_std)

    def encode(self, encoder: VisionEncoder, batch: MicroBatch) -> torch.Tensor:
        """Return (encoded_rows, (1 + L) * D): this rank's image tokens, each with its deepstack features."""
        self.clock.switch("vision")
        # A rank without images encodes a blank image, whose token is not used and whose gradient is zero.
        encoded = encoder(batch)[: batch.encoded_rows]
        self.clock.switch_on_gradient(encoded, "vision")
        return encoded

    def embed(self, batch: MicroBatch) -> Embedded:
        """Embed the tokens, with image tokens inserted; the function between the layers adds the features."""
        encoded = self.encode(self.vision, batch) if batch.features is None else batch.features
        self.clock.switch("language")
        # The tokens of this rank's own images may have been encoded on any rank of the first group.
        gathered = gather_rows(encoded, batch.gathered_rows, *image_groups(self.groups, self.parallel))
        rows = gathered.index_select(0, batch.image_rows)
        image_tokens, *features = rows.chunk(1 + self.shape.num_deepstack, dim=-1)  # each (V, D)
        places = batch.image_index
        hidden = self._embed_with(image_tokens, batch.input_ids, places)
        following = None
        if self.predicts_second:
            # Multi-token prediction embeds the next token of each token, which may be an image token. It gets no
            # deepstack features.
            image_tokens = gathered.index_select(0, batch.next_image_rows)[:, : hidden.size(-1)]
            following = self._embed_with(image_tokens, batch.next_ids, batch.next_image_index)

        def add_feature(number: int, hidden: torch.Tensor) -> torch.Tensor:
            # Layer i gets level i, whichever layer of the encoder the level comes from.
            if number >= len(features):
                return hidden
            return hidden.index_add(0, places, features[number][:, None].to(hidden.dtype))

        return Embedded(hidden, add_feature, following)

    def _embed_with(self, image_tokens: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the embeddings (s, 1, D) of token ids (1, t), with image tokens (V, D) at their places (V,)."""
        hidden = self.language.embed(ids)
        return hidden.index_copy(0, places, image_tokens[:, None].to(hidden.dtype))

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Extend the base method by the vision encoder's parameters, if tensor-parallel ranks share the images."""
        # Each of these ranks has the gradient of the images that it encodes.
        shared = self.pre_process and self.parallel.vision_split == "images" and self.parallel.tp > 1
        vision = self.vision.parameters() if shared else ()
        return super().partial_gradients() + [param for param in vision if param.requires_grad]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Extend the base method: mark the replicas of a vision encoder that every tensor-parallel rank holds whole."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        copy = (0, self.groups.tp.rank(), self.groups.dp_cp.rank())
        for name, value in state.items():
            is_vision = name.startswith(f"{prefix}vision.") and isinstance(value, ShardedTensor | ShardedObject)
            if is_vision and self.parallel.vision_split == "images":
                value.replica_id = copy
        return state
