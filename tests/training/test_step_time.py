"""Timing steps ends also where a step takes long."""

import time

from polarlm.training import batching


def test_on_a_crowded_machine_fewer_steps_are_timed(monkeypatch):
    taken = []
    monkeypatch.setattr(batching, "one_step", lambda config, vocabulary: lambda: taken.append(time.sleep(0.05)))
    (seconds,) = batching.seconds_per_step([{}], 10, seconds=0.01)
    assert batching.WARM_UP < len(taken) < batching.WARM_UP + batching.FEWEST
    assert seconds >= 0.05
