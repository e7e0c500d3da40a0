"""lm-evaluation-harness on a polarlm model: the adapter, and tasks made of local files.

    results = run_tasks(model, tokenizer, ["blimp", "lambada"])          # local files, no network
    results = run_tasks(model, tokenizer, ["hellaswag"])                 # anything the harness has

The harness is an optional extra: pip install 'polarlm[tasks]'.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarlm.data import Tokenizer
from polarlm.errors import UserError
from polarlm.evaluation.downstream import (
    BLIMP_FILE,
    LAMBADA_FILE,
    encode_pair,
    likelihoods,
    read_rows,
    rolling_windows,
    start_token,
    task_file,
)
from polarlm.evaluation.generate import Sampling, stream_text
from polarlm.model import GPT

NEW_TOKENS = 256  # where a task does not say how much to write
# Our own tasks: (file, what a task's yaml says beside it). The right sentence is the second choice: the harness takes
# the first of two equal ones, and a tie is wrong.
LOCAL_TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "blimp": (
        BLIMP_FILE,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "",
            "doc_to_choice": "{{[sentence_bad, sentence_good]}}",
            "doc_to_target": 1,
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    ),
    "lambada": (
        LAMBADA_FILE,
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "target_delimiter": "",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            ],
        },
    ),
}


def harness_model(model: GPT, tokenizer: Tokenizer) -> Any:
    """The model as lm_eval.api.model.LM."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UserError("lm-evaluation-harness is not installed: pip install 'polarlm[tasks]'") from None

    class PolarlmLM(LM):
        """What the harness asks of a model."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            answers = likelihoods(model, [encode_pair(tokenizer, *request.args) for request in requests])
            return [(one.nats, one.greedy) for one in answers]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            windows, owner = [], []
            for number, request in enumerate(requests):
                ids = tokenizer.encode(request.args[0])
                for window in rolling_windows(ids, start_token(tokenizer), model.config.context):
                    windows.append(window)
                    owner.append(number)
            sums = [0.0] * len(requests)
            for number, one in zip(owner, likelihoods(model, windows)):
                sums[number] += one.nats
            return sums

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [generate_answer(model, tokenizer, *request.args) for request in requests]

    return PolarlmLM()


def generate_answer(model: GPT, tokenizer: Tokenizer, prompt: str, options: dict[str, Any]) -> str:
    """What the model writes after a prompt: greedy unless the task's `do_sample` is set, up to one of its `until`."""
    until = options.get("until") or []
    stop = [until] if isinstance(until, str) else list(until)
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
    count = int(options.get("max_gen_toks") or NEW_TOKENS)
    return "".join(stream_text(model, tokenizer, prompt, count, Sampling(temperature=temperature), stop=stop))


def run_tasks(
    model: GPT, tokenizer: Tokenizer, tasks: Sequence[str], *, limit: int | None = None, include: Path | None = None
) -> dict[str, dict[str, Any]]:
    """{task: {metric: value}}; `blimp` and `lambada` come from local files, `include` is a folder of own yamls."""
    adapter = harness_model(model, tokenizer)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as place:
        for task in set(tasks) & set(LOCAL_TASKS):
            write_local_task(Path(place), task, limit)
        folders = [place] + ([str(include)] if include else [])
        # The harness's own tasks take long to list: only where one of them is asked for.
        ours = all((Path(place) / f"{task}.yaml").exists() for task in tasks)
        manager = TaskManager(include_path=folders, include_defaults=not ours and include is None)
        try:
            outcome = simple_evaluate(
                model=adapter, tasks=list(tasks), task_manager=manager, limit=None if ours else limit, bootstrap_iters=0
            )
        except KeyError as error:
            raise UserError(f"lm-evaluation-harness has no task {error}") from error
    return {
        task: {key.partition(",")[0]: value for key, value in numbers.items() if isinstance(value, (int, float))}
        for task, numbers in outcome["results"].items()
    }


def write_local_task(folder: Path, task: str, limit: int | None = None) -> None:
    """The yaml and the rows of one of our own tasks."""
    import yaml

    name, options = LOCAL_TASKS[task]
    rows = folder / f"{task}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in read_rows(task_file(name), limit)), encoding="utf-8")
    described = {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "num_fewshot": 0,
        **options,
        "metadata": {"version": 1.0},
    }
    (folder / f"{task}.yaml").write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
