"""RegistryConfig: when a newly registered model version becomes the champion. Execution: it enters no fingerprint."""

from pydantic import Field

from dataset_builders.contracts.strict import StrictModel


class RegistryConfig(StrictModel):
    """Every new version gets the alias `candidate`; one that beats the champion by the margin gets `champion`."""

    metric: str = Field(
        default="exact_match",
        min_length=1,
        description="score that is compared, higher is better: a metric's name, or metric/subset",
    )
    margin: float = Field(default=0.005, ge=0, description="by how much a version must beat the champion")
