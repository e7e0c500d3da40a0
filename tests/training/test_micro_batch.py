"""micro_batch_tokens=auto: as much as fits, halved where the GPU refuses, and the same number when the run resumes."""

import itertools

import pytest

from polarlm.errors import UserError
from polarlm.runs.identity import experiment_of
from polarlm.training import batching
from polarlm.training.batching import first_that_runs, fitting_tokens, with_micro_batch
from tests.training.tiny_jobs import composed


def config(place, *more):
    return {**composed(place, "trainer.micro_batch_tokens=auto", "trainer.batch_tokens=1024", *more), "group": None}


def test_more_memory_takes_larger_micro_batches_each_a_part_of_the_batch_and_each_half_of_the_last(tmp_path):
    asked = config(tmp_path)
    by_memory = [list(fitting_tokens(asked, 257, "32-true", 1, memory)) for memory in (1e6, 3e6, 1e12)]
    assert by_memory[0][0] < by_memory[1][0] <= by_memory[2][0] == 1024
    for sizes in by_memory:
        assert all(1024 % size == 0 and size % 16 == 0 for size in sizes) and sizes[-1] == 16
        assert all(after <= before / 2 for before, after in itertools.pairwise(sizes))
    with pytest.raises(UserError, match=r"One window.*model\.checkpointing=true"):
        next(fitting_tokens(asked, 257, "32-true", 1, 1e5))


def test_out_of_memory_halves_until_a_step_runs_or_says_what_to_do():
    tried = []
    assert first_that_runs(iter([1024, 512, 256, 128]), lambda tokens: tried.append(tokens) or tokens <= 256) == 256
    assert tried == [1024, 512, 256]
    with pytest.raises(UserError, match=r"1,024, 512 tokens.*model\.checkpointing=true"):
        first_that_runs(iter([1024, 512]), lambda tokens: False)


def test_a_resumed_run_takes_the_number_that_its_first_process_recorded(tmp_path, monkeypatch):
    import yaml

    asked = config(tmp_path, "name=run")
    chosen = with_micro_batch(asked, 257, "cpu", "32-true")
    assert isinstance(chosen["trainer"]["micro_batch_tokens"], int) and chosen["micro_batch_found"]
    assert experiment_of(chosen) == experiment_of(asked)  # the same experiment, whatever the card decided
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    stored = {**chosen, "trainer": {**chosen["trainer"], "micro_batch_tokens": 128}}  # another card had decided this
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    monkeypatch.setattr(batching, "fitting_tokens", lambda *_: pytest.fail("searched again"))
    assert with_micro_batch(asked, 257, "cuda", "bf16-mixed")["trainer"]["micro_batch_tokens"] == 128
