"""Every setting of train.py and eval.py with its type, range and allowed words; the defaults stand in configs/.

Imports nothing heavy: a wrong value is refused before torch is loaded and before anything is written. The settings of a
corpus, a tokenizer and a model's size are described where they are read (data, model) and only named here.
"""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.settings import setting

PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")
ONE_FOLDER = r"(?!\.+$)[\w.+=@-][\w.+=@ -]{0,199}"  # neither "." nor "..", nothing that leads into another folder


@dataclass(frozen=True)
class TrainerSettings:
    """How long, how often, and on what."""

    accelerator: str = setting(choices=("auto", "cpu", "gpu", "cuda", "mps"))
    strategy: str = setting(choices=("auto", "ddp", "fsdp"))
    devices: int = setting(at_least=1)
    nodes: int = setting(at_least=1)
    precision: str = setting(choices=PRECISIONS)
    compile: bool | str = setting(choices=("auto",))
    deterministic: bool = setting()
    max_steps: int | None = setting(at_least=1)
    max_tokens: int | None = setting(at_least=1)
    batch_tokens: int = setting(at_least=1)
    micro_batch_tokens: int = setting(at_least=1)
    log_every: int = setting(at_least=1)
    val_every: int = setting(at_least=1)
    checkpoint_every: int = setting(at_least=1)


@dataclass(frozen=True)
class OptimSettings:
    """The optimiser; keys that only some optimisers have may be absent."""

    lr: float = setting(above=0, at_most=100)
    weight_decay: float = setting(at_least=0)
    estimator_lr_factor: float = setting(at_least=0)
    grad_clip: float | None = setting(above=0)
    betas: list[float] = setting(list, count=2, at_least=0, below=1)
    eps: float = setting(1e-8, above=0)


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning-rate curve; keys that only some curves have may be absent."""

    kind: str = setting(choices=("cosine", "wsd", "constant"))
    warmup_fraction: float = setting(at_least=0, at_most=1)
    warmup_tokens: int | None = setting(at_least=0)
    decay_fraction: float = setting(0.2, at_least=0, at_most=1)
    final_factor: float = setting(0.1, at_least=0, at_most=1)


@dataclass(frozen=True)
class LoggerSettings:
    """The sink beside metrics.jsonl."""

    kind: str = setting(choices=("wandb", "trackio", "none"))
    project: str = setting(
        "polarlm", pattern=r"[^/\\#?%:\x00-\x1f]{1,128}", like="a project's name without / \\ # ? % :"
    )
    entity: str | None = None
    mode: str = setting("auto", choices=("auto", "online", "offline"))


@dataclass(frozen=True)
class DiagnosticsSettings:
    """How often to look inside the model, and with how much text."""

    every: int = setting(at_least=0)
    tokens: int = setting(at_least=2)
    length: int = setting(at_least=2)


@dataclass(frozen=True)
class SampleSettings:
    """The text generated at the end of a run."""

    prompt: str = setting()
    tokens: int = setting(at_least=0)
    temperature: float = setting(at_least=0)
    top_k: int | None = setting(at_least=1)


@dataclass(frozen=True)
class TrainSettings:
    """The keys of train.yaml itself; the groups are checked by their own schemas."""

    seed: int = setting(at_least=0, below=2**63)
    name: str | int | None = setting(
        pattern=ONE_FOLDER, like="one folder name: letters, digits, and any of . _ - + = @"
    )
    group: str | int | None = setting(pattern=r"[^\x00-\x1f]{1,128}", like="a short name")
    resume: str = setting(choices=("auto", "never"))
    runs_dir: str = setting(pattern=r"[^\x00]+", like="a folder")
    cache_dir: str = setting(pattern=r"[^\x00]+", like="a folder")
    sample: SampleSettings = setting()


@dataclass(frozen=True)
class EvalSettings:
    """The keys of eval.yaml."""

    checkpoint: str = setting(pattern=r"[^\x00]+", like="a run folder, or a .ckpt or .safetensors file inside one")
    split: str = setting(choices=("val", "test", "train"))
    device: str = setting(choices=("auto", "cpu", "cuda"))
    cache_dir: str = setting(pattern=r"[^\x00]+", like="a folder")
    out: str | None = None


PerHead = float | list[float]


@dataclass(frozen=True)
class BlockSettings:
    """What the keys of blocks mean, whichever block has them.

    A new block needs no entry here: a key without one keeps the type of its default in the block's yaml, and the
    block's constructor checks the rest.
    """

    kernel: str = setting("", choices=("student", "exponential", "gaussian"))
    projection: str = setting("", choices=("none", "per_head", "global", "evidence"))
    radial: str = setting("", choices=("off", "own", "shared"))
    norm_position: str = setting("", choices=("post", "pre", "both"))
    norm_scope: str = setting("", choices=("global", "per_head"))
    residual_form: str = setting("", choices=("full", "dot"))
    backend: str = setting("", choices=("auto", "reference", "streaming", "triton"))
    lift: int = setting(1, choices=(1, 2))
    frozen: list[str] = setting(list)
    layers: list[int] | None = setting(None, at_least=0)
    nu: PerHead = setting(1.0, above=0)
    nu_t: PerHead = setting(1.0, above=0)
    tau: PerHead = setting(1.0, above=0)
    eta_q: PerHead | None = setting(None, at_least=0)
    eta_k: PerHead | None = setting(None, at_least=0)
    eta_tq: PerHead | None = setting(None, at_least=0)
    eta_tk: PerHead | None = setting(None, at_least=0)
    sigma_0: PerHead | None = setting(None, at_least=0)
    sigma_t0: PerHead | None = setting(None, at_least=0)
    sigma_process: PerHead | None = setting(None, at_least=0)
    mu: PerHead = setting(0.0, at_least=0)
    m_inf: float = setting(0.0, at_least=0)
    radius: float = setting(1.0, above=0)
    nu_r: float = setting(1.0, above=0)
    eta_rq: float = setting(0.0, at_least=0)
    eta_rk: float = setting(0.0, at_least=0)
    sigma_r0: float = setting(0.0, at_least=0)
    alpha: float = setting(0.0, at_least=0)
    beta: float = setting(0.0, at_least=0)


def group_schemas() -> dict[str, type]:
    """The schema of every group of train.yaml; `model` and `block` need a word more (launch/check.py)."""
    from polarlm.data.config import DataConfig
    from polarlm.data.tokenizers.config import TokenizerConfig

    return {
        "data": DataConfig,
        "tokenizer": TokenizerConfig,
        "optim": OptimSettings,
        "schedule": ScheduleSettings,
        "trainer": TrainerSettings,
        "logger": LoggerSettings,
        "diagnostics": DiagnosticsSettings,
    }
