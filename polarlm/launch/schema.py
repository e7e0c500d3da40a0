"""Every setting of train.py and eval.py with its type, range and allowed words; the defaults stand in configs/.

Imports nothing heavy: a wrong value is refused before torch is loaded and before anything is written. The settings of a
corpus, a tokenizer and a model's size are described where they are read (data, model) and only named here.
"""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.model.config import FRAME_NAMES
from polarlm.settings import LARGEST, SMALLEST, setting

PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")
ONE_FOLDER = r"(?!\.+$)[\w.+=@-][\w.+=@ -]{0,199}"  # neither "." nor "..", nothing that leads into another folder


PATHS = "a run folder, or a .ckpt or .safetensors file inside one"


@dataclass(frozen=True)
class TrainerSettings:
    """How long, how often, and on what."""

    accelerator: str = setting(choices=("auto", "cpu", "gpu", "cuda", "mps"))
    strategy: str = setting(choices=("auto", "ddp", "fsdp"))
    devices: int = setting(at_least=1, at_most=1024)
    nodes: int = setting(at_least=1, at_most=2**16)
    precision: str = setting(choices=PRECISIONS)
    compile: bool | str = setting(choices=("auto",))
    deterministic: bool = setting()
    max_steps: int | None = setting(at_least=1, at_most=10**12)
    max_tokens: int | None = setting(at_least=1, at_most=10**18)
    batch_tokens: int = setting(at_least=1, at_most=2**28)
    micro_batch_tokens: int | str = setting(at_least=1, at_most=2**28, choices=("auto",))
    log_every: int = setting(at_least=1)
    val_every: int = setting(at_least=1)
    checkpoint_every: int = setting(at_least=1)
    keep_checkpoints: int = setting(at_least=1)
    on_nonfinite: str = setting(choices=("stop", "skip", "rewind"))
    max_incidents: int = setting(at_least=0)
    spike_z: float = setting(at_least=0)


@dataclass(frozen=True)
class OptimSettings:
    """What the keys of optimisers mean, whichever optimiser has them (see `check_open`)."""

    lr: float = setting(at_least=1e-12, at_most=100)
    weight_decay: float = setting(at_least=0, at_most=1000)
    estimator_lr_factor: float = setting(at_least=0, at_most=1000)
    lr_base_width: int | None = setting(at_least=1)
    grad_clip: float | None = setting(at_least=SMALLEST)
    betas: list[float] = setting(count=2, at_least=0, below=1)
    momentum: float = setting(at_least=0, below=1)
    eps: float = setting(at_least=1e-20, at_most=1)


@dataclass(frozen=True)
class ScheduleSettings:
    """What the keys of learning-rate schedules mean, whichever schedule has them."""

    warmup_fraction: float = setting(at_least=0, at_most=1)
    warmup_tokens: int | None = setting(at_least=0)
    decay_fraction: float = setting(at_least=0, at_most=1)
    final_factor: float = setting(at_least=0, at_most=1)
    shape: str = setting(choices=("linear", "sqrt"))


@dataclass(frozen=True)
class LoggerSettings:
    """What the keys of loggers mean, whichever logger has them."""

    project: str = setting(pattern=r"[^/\\#?%:\x00-\x1f]{1,128}", like="a project's name without / \\ # ? % :")
    entity: str | None = setting()
    mode: str = setting(choices=("auto", "online", "offline"))
    artifacts: str = setting(choices=("none", "weights", "checkpoints"))


@dataclass(frozen=True)
class CallbackSettings:
    """What the keys of callbacks mean, whichever callback has them."""

    every: int = setting(at_least=1)


@dataclass(frozen=True)
class DiagnosticsSettings:
    """How often to look inside the model, and with how much text."""

    every: int = setting(at_least=0)
    tokens: int = setting(at_least=2, at_most=2**28)
    length: int = setting(at_least=2, at_most=2**28)


@dataclass(frozen=True)
class SampleSettings:
    """The text generated at the end of a run."""

    prompt: str = setting()
    tokens: int = setting(at_least=0, at_most=10**6)
    temperature: float = setting(at_least=0)
    top_k: int | None = setting(at_least=1)


@dataclass(frozen=True)
class RecipeSettings:
    """What a recipe asks of every block that can do it; the rest of a recipe stands in the other groups."""

    qk_norm: bool = False


@dataclass(frozen=True)
class JobsSettings:
    """What a sweep does about failures."""

    stop_on_failure: bool = False
    retries: int = setting(0, at_least=0, at_most=100)


@dataclass(frozen=True)
class TrainSettings:
    """The keys of train.yaml itself; the groups are checked by their own schemas."""

    seed: int = setting(at_least=0, below=2**63)
    name: str | int | None = setting(
        pattern=ONE_FOLDER, like="one folder name: letters, digits, and any of . _ - + = @"
    )
    group: str | int | None = setting(
        pattern=r"(?!\.+$)[^/\\\x00-\x1f]{1,128}", like="a short name without / and \\ (such as first-look)"
    )
    resume: str = setting(choices=("auto", "never", "force"))
    init_from: str | None = setting(pattern=r"[^\x00]+", like=PATHS)
    runs_dir: str = setting(pattern=r"[^\x00]+", like="a folder")
    cache_dir: str = setting(pattern=r"[^\x00]+", like="a folder")
    sample: SampleSettings = setting()
    jobs: JobsSettings = setting(JobsSettings)
    recipe: RecipeSettings = setting(RecipeSettings)
    match: str | None = setting(None, choices=("parameters", "flops", "seconds"))
    match_block: str = setting("standard", pattern=r"[\w-]+", like="the name of a block")


@dataclass(frozen=True)
class EvalSettings:
    """The keys of eval.yaml; a corpus chosen with data=… is checked by its own schema."""

    checkpoint: str | list[str] = setting(pattern=r"[^\x00]+", like=PATHS)
    protocol: str | list[str] = setting()
    split: str = setting(choices=("val", "test", "train"))
    tokens: int | None = setting(at_least=1)
    context: int | None = setting(at_least=1)
    stride: int | None = setting(at_least=1)
    lengths: list[float | str] = setting(above=0)
    corruptions: list[str] = setting()
    rates: list[float | str] = setting(at_least=0, at_most=1)
    examples: int | None = setting(at_least=1)
    seed: int = setting(at_least=0, below=2**63)
    device: str = setting(choices=("auto", "cpu", "cuda"))
    cache_dir: str = setting(pattern=r"[^\x00]+", like="a folder")
    out: str | None = setting()
    trust_data: bool = setting()


PerHead = float | list[float]


@dataclass(frozen=True)
class BlockSettings:
    """What the keys of blocks mean, whichever block has them."""

    kernel: str = setting(choices=("student", "exponential", "gaussian", "student_mle"))
    projection: str = setting(choices=("none", "per_head", "global", "evidence"))
    radial_correlation: str = setting(choices=("vv", "qk", "one"))
    frequencies: str = setting(choices=("shared", "per_head", "learned"))
    frame: str | None = setting(choices=FRAME_NAMES)
    qk_norm: bool = setting()
    qk_gain: float = setting(at_least=SMALLEST, at_most=1e4)
    forgetting: str = setting(choices=("none", "constant", "content"))
    forget_bias: PerHead = setting(at_least=-100, at_most=100)
    rope: bool = setting()
    head_gate: bool = setting()
    value_residual: bool = setting()
    projector: str = setting(choices=("real", "complex"))
    norm_position: str = setting(choices=("post", "pre", "both"))
    norm_scope: str = setting(choices=("global", "per_head"))
    norm_gain: str = setting(choices=("none", "channel"))
    magnitude: str = setting(choices=("own", "unit"))
    residual_form: str = setting(choices=("full", "dot"))
    retract: str = setting(choices=("norm", "exp"))
    backend: str = setting(choices=("auto", "reference", "native", "streaming", "triton", "flex"))
    lift: int = setting(choices=(1, 2))
    irls_steps: int = setting(at_least=1, at_most=100)
    evidence_clamp: float | None = setting(at_least=0, at_most=LARGEST)
    frozen: list[str] = setting()
    layers: list[int] | None = setting(at_least=0)
    nu: PerHead = setting(at_least=SMALLEST, at_most=LARGEST)
    eta: PerHead | None = setting(at_least=0, at_most=LARGEST)
    nu_t: PerHead = setting(at_least=SMALLEST, at_most=LARGEST)
    tau: PerHead = setting(at_least=SMALLEST, at_most=LARGEST)
    eta_q: PerHead | None = setting(at_least=0, at_most=LARGEST)
    eta_k: PerHead | None = setting(at_least=0, at_most=LARGEST)
    eta_tq: PerHead | None = setting(at_least=0, at_most=LARGEST)
    eta_tk: PerHead | None = setting(at_least=0, at_most=LARGEST)
    sigma_0: PerHead | None = setting(at_least=0, at_most=LARGEST)
    sigma_t0: PerHead | None = setting(at_least=0, at_most=LARGEST)
    sigma_process: PerHead | None = setting(at_least=0, at_most=LARGEST)
    prior_share: PerHead = setting(at_least=0, below=1)
    context_power: PerHead = setting(at_least=0, below=1)
    precision_0: PerHead = setting(at_least=SMALLEST, at_most=LARGEST)
    relax_a: PerHead = setting(at_least=SMALLEST, at_most=LARGEST)
    relax_b: PerHead = setting(at_least=SMALLEST, at_most=LARGEST)
    widen_q: PerHead = setting(at_least=0, at_most=LARGEST)
    widen_k: PerHead = setting(at_least=0, at_most=LARGEST)
    mu: PerHead = setting(at_least=0, at_most=LARGEST)
    damping: float = setting(at_least=0, at_most=LARGEST)
    process_floor: float = setting(at_least=0, at_most=LARGEST)
    inverse_temperature: PerHead = setting(at_least=SMALLEST, at_most=LARGEST)
    scale: float = setting(at_least=1, at_most=LARGEST)
    radius: float = setting(at_least=0.01, at_most=100)
    mu_r: float = setting(at_least=0, at_most=LARGEST)
    nu_r: float = setting(at_least=SMALLEST, at_most=LARGEST)
    m_inf: float = setting(at_least=0, at_most=LARGEST)
    m_eq: float | None = setting(at_least=SMALLEST, at_most=LARGEST)
    eta_rq: float = setting(at_least=0, at_most=LARGEST)
    eta_rk: float = setting(at_least=0, at_most=LARGEST)
    sigma_r0: float = setting(at_least=0, at_most=LARGEST)
    alpha: float = setting(at_least=0, at_most=LARGEST)
    beta: float = setting(at_least=0, at_most=LARGEST)


def group_schemas() -> dict[str, type]:
    """The schemas of the groups whose keys are all known; the others grow with every class (OPEN_GROUPS)."""
    from polarlm.data.config import DataConfig
    from polarlm.data.tokenizer import TokenizerConfig

    return {
        "data": DataConfig,
        "tokenizer": TokenizerConfig,
        "trainer": TrainerSettings,
        "diagnostics": DiagnosticsSettings,
    }


# Groups that name a class of ours as their _target_: a new class brings its own keys.
SECTIONED_GROUPS: dict[str, type] = {"logger": LoggerSettings, "callbacks": CallbackSettings}  # several may be chosen
OPEN_GROUPS: dict[str, type] = {"block": BlockSettings, "optim": OptimSettings, "schedule": ScheduleSettings}
