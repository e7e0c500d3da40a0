"""Timing steps ends also where a step takes long."""

import time

from polarlm.training import step_time


def test_on_a_crowded_machine_fewer_steps_are_timed(monkeypatch):
    taken = []
    monkeypatch.setattr(step_time, "one_step", lambda config, vocabulary: lambda: taken.append(time.sleep(0.05)))
    (seconds,) = step_time.seconds_per_step([{}], 10, seconds=0.01)
    assert step_time.WARM_UP < len(taken) < step_time.WARM_UP + step_time.FEWEST
    assert seconds >= 0.05
