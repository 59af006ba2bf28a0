import pytest

from trainer.contract import OptimConfig
from trainer.optim import learning_rate

CONFIG = OptimConfig(lr=1.0, min_lr_fraction=0.1, warmup_steps=4, weight_decay=0)


def test_warmup_peak_middle_and_end():
    rates = [learning_rate(step, CONFIG, 15) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.55)  # half way down
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_without_warmup_the_first_step_is_at_the_peak():
    config = CONFIG.model_copy(update={"warmup_steps": 0})
    assert learning_rate(0, config, 10) == 1.0
    assert learning_rate(0, config, 1) == 1.0
