"""Bugs in the training loop, the optimisers and the schedules."""

# ruff: noqa: E501
# fmt: off
from tools.mutants.mutant import mutants

P = "polarlm/training/"
T = "tests/training/"

MUTANTS = [
    *mutants(
        f"{P}module.py",
        f"{T}test_gradients.py",
        ("if self.optim[\"grad_clip\"]:", "if False:", "gradients are not clipped"),
        ("loss = nats / batch[\"counted\"]", "loss = nats / batch[\"targets\"].numel()", "micro-batches are weighed by tokens instead of counted targets"),
        ("self.step_loss = detached if self.step_loss is None else self.step_loss + detached", "self.step_loss = detached", "the logged loss is the last micro-batch's"),
        ("self.step_lr = optimizer.param_groups[0][\"lr\"]", "self.step_lr = optimizer.param_groups[-1][\"lr\"]", "the logged rate is another group's"),
    ),
    *mutants(
        f"{P}module.py",
        f"{T}test_gradients.py {T}test_schedules.py {T}test_optimisers.py",
        ("return self.schedule.factor((step + 1) * self.batch_tokens, total)", "return self.schedule.factor(step * self.batch_tokens, total)", "the learning rate is off by one step"),
        ("total = self.batch_tokens * self.max_steps\n", "total = self.batch_tokens * (self.max_steps + 1)\n", "the schedule ends one step late"),
    ),
    *mutants(
        f"{P}gradients.py",
        f"{T}test_gradients.py",
        ("torch.clamp(limit / (norm + 1e-6), max=1.0)", "limit / (norm + 1e-6)", "small gradients are scaled up to the limit"),
    ),
    *mutants(
        f"{P}callbacks.py",
        f"{T}test_gradients.py",
        ("loss / trainer.accumulate_grad_batches, reduce_op=\"mean\"", "loss, reduce_op=\"mean\"", "the logged loss under accumulation is not averaged"),
    ),
    *mutants(
        f"{P}callbacks.py",
        "tests/end_to_end/test_resume.py",
        ("torch.manual_seed((((self.seed * 1_000_003 + trainer.global_step) * 1009)", "torch.manual_seed((((self.seed * 1_000_003 + batch_index) * 1009)", "dropout depends on how often the run was resumed"),
        ("logger.rewind(trainer.global_step)", "pass", "rows after the checkpoint stay when a run is resumed"),
    ),
    *mutants(
        f"{P}optimisers/adamw.py",
        f"{T}test_gradients.py {T}test_optimisers.py",
        ("betas=(betas[0], betas[1])", "betas=(betas[0], 0.999)", "AdamW's second beta is ignored"),
        ("\"params\": groups[\"no_decay\"], \"weight_decay\": 0.0}", "\"params\": groups[\"no_decay\"], \"weight_decay\": weight_decay}", "gains and biases decay"),
        ("\"weight_decay\": 0.0, \"lr\": lr * estimator_lr_factor}", "\"weight_decay\": 0.0, \"lr\": lr}", "the estimator's own learning rate is ignored"),
    ),
    *mutants(
        f"{P}optimisers/groups.py",
        f"{T}test_optimisers.py",
        ("(\"decay\" if parameter.ndim >= 2 else \"no_decay\")", "(\"decay\" if parameter.ndim >= 1 else \"no_decay\")", "vectors decay"),
        ("if id(parameter) in seen or not parameter.requires_grad:", "if not parameter.requires_grad:", "tied weights are in two groups"),
    ),
    *mutants(
        f"{P}optimisers/muon.py",
        f"{T}test_optimisers.py",
        ("adjust_lr_fn=\"match_rms_adamw\"", "adjust_lr_fn=\"original\"", "Muon's steps have another size than AdamW's"),
        ("and isinstance(module, nn.Linear) and id(module) in inside", "and isinstance(module, nn.Linear)", "Muon takes the output layer too"),
    ),
    *mutants(
        f"{P}schedules/cosine.py",
        f"{T}test_schedules.py",
        ("progress = min(1.0, (tokens - warmup)", "progress = min(1.0, tokens", "the cosine begins before the warm-up ends"),
        ("* 0.5 * (1 + math.cos(math.pi * progress))", "* (1 - progress)", "a straight line called cosine"),
    ),
    *mutants(
        f"{P}schedules/wsd.py",
        f"{T}test_schedules.py",
        ("if left >= decay:", "if left >= 2 * decay:", "the decay begins too early"),
        ("1 - math.sqrt(1 - left / decay)", "math.sqrt(left / decay)", "the square-root decay is bent the other way"),
    ),
    *mutants(
        f"{P}schedules/warmup.py",
        f"{T}test_schedules.py",
        ("return tokens / warmup if tokens < warmup", "return 1.0 if tokens < warmup", "no warm-up"),
    ),
    *mutants(
        f"{P}batching.py",
        f"{T}test_batching.py",
        ("micro = max(fitting)", "micro = min(fitting)", "micro-batches as small as possible"),
        ("steps = -(-int(max_tokens) // batch_tokens) if", "steps = int(max_tokens) // batch_tokens if", "the last tokens are not trained on"),
    ),
]
