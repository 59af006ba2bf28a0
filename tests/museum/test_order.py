"""The samples that a step sees: over ranks, epochs and resumes."""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tests.helpers.bins import ListedPlan
from tests.museum.fault import Fault, fault_seen
from trainer.data.order import TrainingOrder, bins_for_step

pytestmark = pytest.mark.promise(
    "athanor has none of the museum's published faults, and each test fails where the fault is put in."
)

BINS, BATCH, STEPS = 10, 4, 12  # an epoch ends in the middle of a batch


def order(rank: int = 0, ranks: int = 1) -> TrainingOrder:
    reader = SimpleNamespace(bins=ListedPlan([()] * BINS))
    return TrainingOrder(reader, seed=3, global_batch_size=BATCH, dp_rank=rank, dp=ranks)


def undisturbed() -> list[Counter]:
    """Return the bins of each step of an undisturbed training with one process."""
    return [Counter(bins_for_step([BINS], seed=3, step=step, global_batch_size=BATCH)) for step in range(STEPS)]


def test_every_epoch_has_an_order_of_its_own():
    """The sampler was not told of a new epoch, so that every epoch had the order of the first.

    https://github.com/pytorch/pytorch/issues/31771 https://github.com/Lightning-AI/pytorch-lightning/issues/224
    """

    def check(epochs: Sequence[Sequence[int]]) -> None:
        assert all(sorted(epoch) == list(range(BINS)) for epoch in epochs) and epochs[0] != epochs[1]

    seen = [number for step in range(5) for number in order().share(step)]  # two epochs
    check((seen[:BINS], seen[BINS:]))
    with fault_seen():
        check((seen[:BINS], seen[:BINS]))


WHOLE_EPOCHS, INTO_AN_EPOCH = 5, 4  # steps until a stop: two epochs, and 16 bins of them
FAULTS_OF_RESUMES = {
    "from the start": Fault(
        "A resumed training saw its data from the start again, and never the end of it.",
        "https://github.com/hiyouga/EasyR1/issues/57 https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4521",
        lambda whole: (WHOLE_EPOCHS, whole[: len(whole) - WHOLE_EPOCHS * BATCH]),
    ),
    "micro batches for steps": Fault(
        "A resumed training skipped as many micro batches as it had done steps, so it saw data of the last hours "
        "again.",
        "https://github.com/EleutherAI/gpt-neox/pull/308",
        lambda whole: (WHOLE_EPOCHS, whole[WHOLE_EPOCHS:]),
    ),
    "the order of the first epoch": Fault(
        "After a resume in the second epoch, the skipped samples were those of the first epoch's order.",
        "https://github.com/huggingface/accelerate/issues/2016",
        lambda whole: (INTO_AN_EPOCH, whole[INTO_AN_EPOCH * BATCH - BINS : BINS] + whole[2 * BINS :]),
    ),
    "the next epoch skipped": Fault(
        "After a save at the end of an epoch, the restored position was the end of the next epoch too, which was "
        "skipped.",
        "https://github.com/verl-project/verl/issues/7401",
        lambda whole: (WHOLE_EPOCHS, whole[WHOLE_EPOCHS * BATCH + BINS :]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_RESUMES.values(), ids=FAULTS_OF_RESUMES)
def test_a_resumed_training_goes_on_where_it_stopped(fault):
    whole = list(order()(0, STEPS))

    def check(stopped: int, rest: list[int]) -> None:
        assert rest == whole[stopped * BATCH :]

    for stopped in (WHOLE_EPOCHS, INTO_AN_EPOCH):
        check(stopped, list(order()(stopped, STEPS)))
    with fault_seen():
        check(*fault.put_in(whole))


def test_another_number_of_ranks_goes_on_with_the_same_data():
    """A training that was resumed on fewer ranks used one rank's position in the data, and left out the samples of the
    other ranks.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5637
    """
    stopped = 5

    def check(numbers: list[int]) -> None:
        assert sum(undisturbed()[:stopped], Counter(numbers)) == sum(undisturbed(), Counter())

    for ranks in (1, 4):
        check([number for rank in range(ranks) for number in order(rank, ranks)(stopped, STEPS)])
    with fault_seen():
        check(list(order(0, 2)(stopped, STEPS)))


def test_the_end_of_an_epoch_is_learnt():
    """Batches at the end of an epoch that do not fill a step were left out, or their gradients were added to the next
    epoch's.

    https://github.com/NVIDIA-NeMo/Automodel/pull/2257 https://github.com/meta-pytorch/torchtune/pull/2745
    """

    def check(steps: Sequence[Sequence[int]]) -> None:
        seen = Counter(number for step in steps for number in step)
        assert {len(step) for step in steps} == {BATCH} and set(seen.values()) == {2} and len(seen) == BINS

    check([order().share(step) for step in range(5)])  # two epochs of two and a half steps
    full = [order().share(step) for step in (0, 1)]
    with fault_seen():
        check(full + full)
