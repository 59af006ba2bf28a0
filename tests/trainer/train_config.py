"""The settings of a training, for tests of what is computed from settings."""

from tests.helpers.run_dir import OPTIM
from trainer.contract.run import TrainConfig


def train_config(**settings: object) -> TrainConfig:
    """Return nine steps in float32, with these settings."""
    usual = {"seed": 1, "num_steps": 9, "global_batch_size": 2, "precision": "float32", "heldout_interval": 9}
    return TrainConfig(**{**usual, "optim": OPTIM, **settings})
