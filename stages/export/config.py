"""The config of export."""

from dataset_builders.contracts.strict import StrictModel


class ExportConfig(StrictModel):
    """Identity: no field of its own, because the checkpoint and the source determine everything."""
