"""The names of the polar block's settings, and the only place that knows the old ones; imports nothing heavy.

A block is a list of parts (configs/block/<part>/<choice>.yaml), with the paper's six symbols on top. Before, it was one
flat mapping: {kernel: student, radial: none, nu_t: 3.0, …}. Run identities and study rows are still made of that
mapping, stored configurations of that shape are read, and its keys and block names may be typed, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from polarlm.errors import UserError
from polarlm.locations import CONFIGS, own_configs, shipped_settings

POLAR = "polarlm.attention.PolarAttention"
PARTS = ("inputs", "transport", "precision", "influence", "forgetting", "aggregate", "radial", "step", "output")
SYMBOLS = ("nu", "eta", "mu", "alpha", "beta", "m_inf")

# Old key: the part that has it now (several: the first of them that has it decides), and its old default.
OLD: dict[str, tuple[str, Any]] = {
    "kernel": ("influence", "student"),
    "projection": ("step", "per_head"),
    "radial": ("radial", "none"),
    "radial_correlation": ("radial aggregate", "vv"),
    "rotate_values": ("transport", True),
    "frequencies": ("transport", "shared"),
    "forgetting": ("forgetting", "content"),
    "forget_bias": ("forgetting", 0.0),
    "head_gate": ("output", False),
    "value_residual": ("inputs", False),
    "transport": ("transport", "rotary"),
    "radial_flow": ("precision", "decay"),
    "consensus": ("aggregate", "none"),
    "uncertainty": ("precision", "none"),
    "projector": ("step", "real"),
    "tie_output": ("output", False),
    "project_stream": ("", "attention"),
    "norm_position": ("inputs", "both"),
    "norm_scope": ("inputs", "per_head"),
    "norm_gain": ("inputs", "none"),
    "lift": ("inputs", 1),
    "magnitude": ("precision", "own"),
    "norm_values": ("inputs", True),
    "value_weight_decay": ("inputs", False),
    "residual_form": ("influence", "full"),
    "evidence_clamp": ("step", 8.0),
    "alpha_over_m": ("step", True),
    "retract": ("step", "none"),
    "irls_steps": ("influence", 1),
    "nu_t": ("influence", 3.0),
    "tau": ("influence", 1.0),
    "eta_tq": ("influence", None),
    "eta_tk": ("precision", None),
    "sigma_t0": ("precision", None),
    "m_inf": ("precision", 0.1),
    "mu": ("precision", 0.01),
    "mu_spread": ("precision", True),
    "radius": ("inputs", 1.0),
    "alpha": ("step", 1.0),
    "beta": ("radial", 0.1),
    "m_eq": ("precision", 1.0),
    "mu_r": ("radial aggregate", 0.0),
    "nu_r": ("radial", 4.0),
    "eta_rq": ("radial", 0.316),
    "eta_rk": ("radial aggregate", 0.316),
    "sigma_r0": ("radial aggregate", 0.316),
    "prior_share": ("precision", 0.5),
    "context_power": ("precision", 0.5),
    "precision_0": ("precision", 1.0),
    "relax_a": ("precision", 1.0),
    "relax_b": ("precision", 0.1),
    "widen_q": ("precision", 0.1),
    "widen_k": ("precision", 0.0),
    "frozen": ("", ("alpha", "nu_t")),
    "backend": ("", "auto"),
}
# Where a symbol on top is the old key of a chosen part; other parts leave it alone, and the old mapping has it anyway.
OF_SYMBOL = {"nu": "nu_t", "mu": "mu", "alpha": "alpha", "beta": "beta", "m_inf": "m_inf"}
SWITCHES = ("kernel", "radial", "forgetting", "transport", "consensus", "uncertainty", "radial_flow", "magnitude",
            "norm_values", "retract", "tie_output")  # fmt: skip
WORDS = (*SWITCHES, "project_stream", "frame")
OFF = {"off": "none", "false": "none", "no": "none"}  # what a yaml or a command line made of `off`
UNIT = {"on": "own", "true": "own", "off": "unit", "false": "unit"}
TANGENT = {"none": "", "attention": "+tangent", "both": "+tangent_both"}  # project_stream → the residual frame's suffix
BRANCHES = {suffix: branches for branches, suffix in TANGENT.items()}

# Blocks that were files of their own: the block each starts from, and what differs.
_CONSTANT = {
    "block/influence": "exponential", "block.influence.residual_form": "dot", "block.step.projection": "none",
    "block/radial": "none", "block.transport.rotate_values": "false", "block.inputs.norm_gain": "channel",
    "block/precision": "unit", "block/inputs": "raw_values", "block.inputs.value_weight_decay": "true",
    "block.mu": "0.0", "block.frozen": "[tau,eta_tq,eta_tk,sigma_t0,m_inf,radius,alpha]",
}  # fmt: skip
# The ladder from QK-normed attention to the paper's block: each rung changes one setting of the rung before.
_RUNGS: tuple[tuple[str, dict[str, str]], ...] = (
    ("polar_distance", {"block.influence.residual_form": "full"}),
    ("polar_radius", {"block.inputs.norm_gain": "none"}),
    ("polar_scalars", {"block.frozen": "[alpha]"}),
    ("polar_rotated", {"block.transport.rotate_values": "true"}),
    ("polar_sphere", {"block/inputs": "sphere"}),
    ("polar_undecayed", {"block.inputs.value_weight_decay": "false"}),
    ("polar_magnitude", {"block/precision": "magnitude"}),
    ("polar_decay", {"block.mu": "0.01"}),
    ("polar_student", {"block/influence": "student"}),
    ("polar_tangent", {"block.step.projection": "evidence"}),
)


def _variants() -> dict[str, tuple[str, dict[str, str]]]:
    rung, rows = dict(_CONSTANT), {"polar_constant": ("polar_paper", dict(_CONSTANT))}
    for name, change in _RUNGS:
        rung |= change
        if name == "polar_student":  # the exponential kernel's own setting leaves with it
            del rung["block.influence.residual_form"]
        rows[name] = "polar_paper", dict(rung)
    rows |= {
        "polar_irls": ("polar", {"block.influence.irls_steps": "3"}),
        "polar_consensus": ("polar", {"block/aggregate": "gate"}),
        "polar_transport": ("polar", {"block/transport": "unitary"}),
        "polar_uncertainty": ("polar", {"block/precision": "carried"}),
    }
    return rows


VARIANTS = _variants()


def is_parted(block: Any) -> bool:
    """Whether a block's settings are a list of parts; a UserError where only some of the parts are there."""
    if not isinstance(block, Mapping) or not any(isinstance(block.get(part), Mapping) for part in PARTS):
        return False
    if "influence" not in block and block.get("_target_") != POLAR:
        return False  # a class of the user's with a mapping of that name
    for part in PARTS:
        given = block.get(part)
        if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
            raise UserError(f"block.{part} must be a part of the block: a kind and its settings. It is {given!r:.80}.")
    return True


# ------------------------------------------------------------------------------------------------ parts → old


def flat_block(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block's settings in the old flat form, whichever form they have; identities and study rows are made of it."""
    flat = dict(block)
    if "frame" in flat and (is_parted(block) or _projects(flat)):
        base, _, suffix = str(flat.pop("frame") or "pre").partition("+")
        flat["project_stream"] = BRANCHES.get(f"+{suffix}" if suffix else "", suffix)
        if base != "pre":
            flat["frame"] = base
    elif _projects(flat):
        flat.setdefault("project_stream", "none")
    if not is_parted(block):
        return flat
    parts = {name: dict(flat.pop(name)) for name in PARTS}
    for name, part in parts.items():  # a setting that is newer than the old form counts where it is not the default
        shipped = part_settings(name, part["kind"])
        new = [key for key in part if key not in OLD and key != "kind" and part[key] == shipped.get(key, part)]
        parts[name] = {key: value for key, value in part.items() if key not in new}
    kinds = {name: part.pop("kind") for name, part in parts.items()}
    symbols = {name: flat.pop(name) for name in SYMBOLS if name in flat}
    old = {name: list(default) if isinstance(default, tuple) else default for name, (_, default) in OLD.items()}
    old |= {OF_SYMBOL[name]: value for name, value in symbols.items() if name in OF_SYMBOL}
    for name in reversed(PARTS):  # where two parts share a number, the radial one's
        if name != "radial":
            old |= parts[name]
    old |= parts["radial"]
    old |= {
        "kernel": kinds["influence"], "radial": kinds["radial"], "forgetting": kinds["forgetting"],
        "transport": kinds["transport"], "consensus": _else("none", mean=kinds["aggregate"]),
        "norm_values": kinds["inputs"] != "raw_values", "tie_output": kinds["output"] == "tied",
    }  # fmt: skip
    precision, step = kinds["precision"], kinds["step"]
    old["uncertainty"] = "carry" if precision == "carried" else "none"
    flows = precision == "equilibrium" or (precision == "carried" and parts["precision"].get("m_eq") is not None)
    old["radial_flow"] = "equilibrium" if flows else "decay"
    old["m_eq"] = parts["precision"]["m_eq"] if flows else OLD["m_eq"][1]
    old["magnitude"] = "unit" if precision == "unit" else parts["precision"].get("magnitude", "own")
    if precision not in ("magnitude", "unit", "equilibrium", "carried"):
        old["magnitude"] = precision
    if step == "geodesic":
        old |= {"retract": "geodesic", "projection": "global"}
    elif step != "retracted":
        old["retract"] = _else("none", tangent=step)
    return {**old, **{key: value for key, value in flat.items() if key not in old or not OLD[key][0]}}


def _projects(flat: Mapping[str, Any]) -> bool:
    """Whether the flat settings of this block always had project_stream."""
    names = ("PolarAttention", "StandardAttention", "ExclusiveAttention")
    return flat.get("_target_") in {f"polarlm.attention.{name}" for name in names}


def _else(neutral: str, **same: str) -> str:
    """`neutral` where the choice is the one that means nothing special, else the choice."""
    ((name, value),) = same.items()
    return neutral if value == name else value


# ------------------------------------------------------------------------------------------------ old → parts


def parts_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that the old flat settings mean, as keyword arguments of PolarAttention; idle old settings are gone."""
    old: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, (_, v) in OLD.items()} | dict(flat)
    for name in ("radial", "consensus", "uncertainty"):
        old[name] = OFF.get(str(old[name]).lower(), old[name])
    old["magnitude"] = UNIT.get(str(old["magnitude"]).lower(), old["magnitude"])
    choices = {
        "inputs": "sphere" if old["norm_values"] else "raw_values",
        "transport": old["transport"],
        "precision": {"own": "magnitude", "unit": "unit"}.get(old["magnitude"], old["magnitude"]),
        "influence": old["kernel"],
        "forgetting": old["forgetting"],
        "aggregate": _else("mean", none=old["consensus"]),
        "radial": old["radial"],
        "step": {"none": "tangent", "norm": "retracted", "exp": "retracted"}.get(old["retract"], old["retract"]),
        "output": "tied" if old["tie_output"] else "free",
    }
    if old["uncertainty"] != "none":
        choices["precision"] = _else("carried", carry=old["uncertainty"])
        old["m_eq"] = old["m_eq"] if old["radial_flow"] == "equilibrium" else None
    elif old["radial_flow"] != "decay":
        choices["precision"] = old["radial_flow"]
    parts: dict[str, Any] = {}
    for part, kind in choices.items():
        parts[part] = {"kind": kind} | {key: old[key] for key in part_settings(part, str(kind)) if key in old}
        if part == "precision" and kind in ("magnitude", "unit"):
            parts[part].pop("magnitude", None)
    known = {"frozen", "backend"}
    parts |= {key: old[key] for key in known}
    unknown = [key for key in flat if key not in OLD and not key.startswith("_") and key not in known]
    return parts | {key: flat[key] for key in unknown if key not in ("frame",)}


def current_block(block: Any) -> Any:
    """A stored block's settings in today's form: parts, and the frame in place of project_stream."""
    if not isinstance(block, Mapping):
        return block  # whoever builds it refuses it
    if is_parted(block):
        return dict(block)
    block = dict(block)
    for key in WORDS:
        if isinstance(block.get(key), (Mapping, list)):
            raise UserError(f"block.{key} must be one word or number. It is {block[key]!r:.80}.")
    if block.get("_target_") == POLAR:
        nu, eta = block.get("nu_t", OLD["nu_t"][1]), block.get("eta_tk")
        symbols = {"nu": nu, "eta": eta, **{s: block.get(s, OLD[s][1]) for s in ("mu", "alpha", "beta", "m_inf")}}
        frame = block.get("frame")
        if frame is None or "project_stream" in block:
            frame = framed(frame, block.get("project_stream", "attention"))
        about = {key: value for key, value in block.items() if key.startswith("_")}
        return about | symbols | parts_of(block) | {"frame": frame}
    if "project_stream" in block:
        frame = framed(block.get("frame"), block.pop("project_stream"))
        if frame != "pre" or "frame" in block:
            block["frame"] = frame
    return block


def brief_block(block: Any) -> Any:
    """Today's settings of a block, each once: a symbol on top stands for the parts that take it from there."""
    if not isinstance(block, Mapping):
        return block
    block = current_block(block)
    for part in PARTS if is_parted(block) else ():
        said = part_settings(part, str(block[part]["kind"]))
        copies = {key: said[key][4:-1] for key in said if str(said[key]).startswith("${..")}
        finer = {k: v for k, v in block.pop(part).items() if k not in copies or v != block.get(copies[k])}
        block[part] = finer.pop("kind")
        block |= {f"{part}.{key}": value for key, value in finer.items()}
    return block


def framed(frame: str | None, project_stream: str) -> str:
    """The residual frame of this name whose steps are projected as project_stream used to say."""
    if project_stream not in TANGENT:
        raise UserError(f"block.project_stream is {project_stream!r}; allowed: {', '.join(TANGENT)}.")
    return str(frame or "pre").partition("+")[0] + TANGENT[project_stream]


# ------------------------------------------------------------------------------------------------ the yaml files


def part_folders() -> list[Path]:
    """Where the parts' choices lie: ours, and the user's own."""
    return [folder / "block" for folder in (CONFIGS, own_configs()) if folder is not None]


def part_choices(part: str) -> list[str]:
    """The names of a part's choices."""
    return sorted({path.stem for folder in part_folders() for path in (folder / part).glob("*.yaml")})


def part_settings(part: str, choice: str) -> dict[str, Any]:
    """What the yaml of a part's choice says; ${..nu} stands for a symbol of the block."""
    for folder in part_folders():
        if re.fullmatch(r"[\w-]+", choice) and (folder / part / f"{choice}.yaml").is_file():
            return _read(folder / part / f"{choice}.yaml")
    return {}


@cache
def _read(path: Path) -> dict[str, Any]:
    import yaml

    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return settings


def users_of(symbol: str) -> list[tuple[str, str]]:
    """(part, choice) of every choice that uses a symbol."""
    matching = [(part, choice) for part in PARTS for choice in part_choices(part)]
    return [(part, choice) for part, choice in matching if f"${{..{symbol}}}" in part_settings(part, choice).values()]


# ------------------------------------------------------------------------------------------------ typed overrides


def current_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(overrides with today's names, a note for every old one)."""
    block = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith("block=")), "standard")
    texts: list[str] = []
    notes: list[str] = []
    retracted = None
    for text in overrides:
        key, equals, value = text.partition("=")
        new = _renamed(key.removeprefix("block."), value, block) if key.startswith("block.") and equals else None
        if key == "block" and value in VARIANTS:
            base, changes = VARIANTS[value]
            new = [f"block={base}", *(f"{name}={setting}" for name, setting in changes.items())]
        if key == "block.retract":
            retracted = value
        if new is None:
            texts.append(text)
        else:
            texts += new
            notes.append(f"{text} is now {' '.join(new)}")
    if retracted == "geodesic":  # walks to the whole estimate by itself
        texts = [text for text in texts if not text.startswith("block.step.projection=")]
    if notes:  # what is typed later, and what is typed beside a variant's own settings, wins
        texts = list({text.lstrip("+~").partition("=")[0]: text for text in texts}.values())
    return texts, notes


def expanded(overrides: Sequence[str]) -> list[str]:
    """A job's overrides with the names of old blocks and keys written out."""
    return current_overrides(overrides)[0]


def _renamed(name: str, value: str, block: str) -> list[str] | None:
    """Today's overrides for an old key of the block, None where the name still holds."""
    if name == "project_stream":
        shipped = shipped_settings("block", block).get("frame") if re.fullmatch(r"[\w-]+", block) else None
        values = [framed(shipped, word.strip()) for word in value.split(",")]
        return [f"block.frame={','.join(values)}"]
    if not (block.startswith("polar") and block != "polar_literal") or name not in (*OLD, *PARTS):
        return None
    words = {
        "kernel": ("influence", {}),
        "radial": ("radial", OFF),
        "forgetting": ("forgetting", {}),
        "transport": ("transport", {}),
        "consensus": ("aggregate", {**dict.fromkeys(("none", *OFF), "mean")}),
        "uncertainty": ("precision", {**dict.fromkeys(("none", *OFF), "magnitude"), "carry": "carried"}),
        "radial_flow": ("precision", {"decay": "magnitude"}),
        "magnitude": ("precision", {"own": "magnitude"} | {k: {"own": "magnitude"}.get(v, v) for k, v in UNIT.items()}),
        "norm_values": ("inputs", {"true": "sphere", "false": "raw_values"}),
        "retract": ("step", {"none": "tangent", "norm": "retracted", "exp": "retracted"}),
        "tie_output": ("output", {"true": "tied", "false": "free"}),
    }
    if name in words:
        part, meaning = words[name]
        chosen = [meaning.get(word.strip().lower(), word.strip()) for word in value.split(",")]
        new = [f"block/{part}={','.join(_existing(part, word, f'block.{name}={value}') for word in chosen)}"]
        return [*new, "block.step.retract=exp"] if (name, value) == ("retract", "exp") else new
    if name in PARTS:
        chosen = [_existing(name, word.strip(), f"block.{name}={value}") for word in value.split(",")]
        return [f"block/{name}={','.join(chosen)}"]
    if name == "nu_t":
        return [f"block.nu={value}"]
    if name in SYMBOLS or name in ("frozen", "backend", *PARTS):
        return None
    part = OLD[name][0].partition(" ")[0]
    return [f"block.{part}.{name}={value}"]


def _existing(part: str, choice: str, typed: str) -> str:
    """The choice, if the part has it."""
    if choice not in part_choices(part):
        raise UserError(
            f"{typed[:80]} does not exist. The part is chosen with block/{part}=…: {', '.join(part_choices(part))}"
        )
    return choice
