import time

import pytest

from polarlm.errors import UserError
from polarlm.training import batching
from polarlm.training.batching import plan_batches, total_steps


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("micro_tokens", [64, 200, 10**9])
def test_tokens_per_step_do_not_depend_on_micro_batch_or_device_count(processes, micro_tokens):
    plan = plan_batches(1024, 64, processes, micro_tokens)
    assert plan.tokens == 1024
    assert plan.micro * plan.context <= max(micro_tokens, 64)


def test_the_fewest_micro_batches_that_fit_are_used():
    assert plan_batches(12 * 64, 64, 1, 7 * 64).micro == 6


def test_a_batch_that_can_not_be_cut_names_the_nearest_one_that_can():
    with pytest.raises(UserError, match="1024"):
        plan_batches(1000, 64, 2, 4096)


def test_max_tokens_wins_over_max_steps_and_rounds_up():
    assert total_steps(5, 1e3, 64) == 16
    assert total_steps(5, None, 64) == 5
    with pytest.raises(UserError, match="max_steps"):
        total_steps(0, None, 64)


def test_on_a_crowded_machine_fewer_steps_are_timed(monkeypatch):
    taken = []
    monkeypatch.setattr(batching, "one_step", lambda config, vocabulary: lambda: taken.append(time.sleep(0.05)))
    (seconds,) = batching.seconds_per_step([{}], 10, seconds=0.01)
    assert batching.WARM_UP < len(taken) < batching.WARM_UP + batching.FEWEST
    assert seconds >= 0.05
