"""Evaluation protocols during training, each with its own period: `callbacks=[samples,length,blimp]`.

Their numbers join the row of their step; samples go to diagnostics/samples.jsonl and, as a table, to wandb. They run on
rank 0 in eval mode and draw no random numbers of the run's, so a run with them ends with the same bits as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl

from polarlm.diagnostics import eval_mode
from polarlm.errors import UserError
from polarlm.training.callbacks import is_sharded
from polarlm.training.recorder import Recorder


class Protocol(pl.Callback):
    """Every `every` steps and after the last: `measure` the model and log what it returns."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise UserError(f"callbacks.{type(self).__name__.lower()}.every={every} must be at least 1 step")
        self.every = every

    def measure(self, model: Any, corpus: Any) -> dict[str, float]:
        """The numbers of this protocol, under the names they are logged with."""
        raise NotImplementedError

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        if is_sharded(module.model):
            raise UserError(f"callbacks={type(self).__name__.lower()} needs the whole model: use trainer.strategy=ddp")
        self.recorder = next((c for c in trainer.callbacks if isinstance(c, Recorder)), None)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        due = step % self.every == 0 or step == trainer.max_steps
        if not due or (batch_idx + 1) % trainer.accumulate_grad_batches or not trainer.is_global_zero:
            return
        with self.recorder.pause() if self.recorder else nullcontext(), eval_mode(module.model):
            self.report(trainer, self.measure(module.model, trainer.datamodule.corpus))  # type: ignore[attr-defined]

    def report(self, trainer: pl.Trainer, numbers: dict[str, Any]) -> None:
        """Log to every logger of the Trainer; metrics.jsonl is one of them."""
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)


class Length(Protocol):
    """The loss at multiples of the trained context, on the first `tokens` of the validation split."""

    def __init__(self, every: int = 1000, lengths: Sequence[int] = (1, 2, 4), tokens: int = 8192) -> None:
        super().__init__(every)
        self.lengths, self.tokens = [int(length) for length in lengths], tokens

    def measure(self, model: Any, corpus: Any) -> dict[str, float]:
        from polarlm.evaluation.robustness import loss_by_length
        from polarlm.evaluation.scores import read_text

        scores = loss_by_length(model, read_text(corpus.store("val"), corpus.tokenizer, self.tokens), self.lengths)
        pairs = zip(scores["factor"], scores["metrics"])
        return {
            f"length/{factor}x/{name}": metrics[name] for factor, metrics in pairs for name in ("loss", "bits_per_byte")
        }


class Blimp(Protocol):
    """Accuracy on minimal pairs of grammar, from a local file (polarlm/evaluation/downstream.py)."""

    def __init__(self, every: int = 1000, examples: int | None = 500) -> None:
        super().__init__(every)
        from polarlm.evaluation.downstream import BLIMP_FILE, read_rows, task_file

        self.rows = read_rows(task_file(BLIMP_FILE), examples)

    def measure(self, model: Any, corpus: Any) -> dict[str, float]:
        from polarlm.evaluation.downstream import blimp

        scores = blimp(model, corpus.tokenizer, self.rows)
        return {f"blimp/{name}": scores[name] for name in ("accuracy", "accuracy_of_paradigms")}


class Samples(Protocol):
    """Continuations of `prompts`, always drawn with the same seed."""

    def __init__(
        self, every: int = 1000, prompts: Sequence[str] = ("",), tokens: int = 64, temperature: float = 0.8,
        top_k: int | None = 50, seed: int = 0,
    ) -> None:  # fmt: skip
        from polarlm.evaluation.generate import Sampling

        super().__init__(every)
        self.prompts, self.tokens = list(prompts), tokens
        self.sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)

    def measure(self, model: Any, corpus: Any) -> dict[str, Any]:
        from polarlm.evaluation.generate import stream_text

        return {
            prompt: "".join(stream_text(model, corpus.tokenizer, prompt, self.tokens, self.sampling))
            for prompt in self.prompts
        }

    def report(self, trainer: pl.Trainer, numbers: dict[str, Any]) -> None:
        """Write each text to samples.jsonl and to the loggers that show text."""
        tokens = trainer.global_step * trainer.datamodule.tokens_per_step  # type: ignore[attr-defined]
        for prompt, text in numbers.items():
            row = {"step": trainer.global_step, "tokens": tokens, "prompt": prompt, "text": text}
            if self.recorder:
                self.recorder.samples.append(row)
            for logger in trainer.loggers:
                if hasattr(logger, "log_samples"):
                    logger.log_samples(row)
