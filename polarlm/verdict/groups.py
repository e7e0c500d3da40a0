"""Which runs repeat one experiment with other seeds, and in what the experiments differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.runs.identity import IRRELEVANT, IRRELEVANT_TRAINER
from polarlm.runs.reading import Run

# Where and under which name a run was made says nothing about what it is.
NEVER_COMPARED = ("seed", "choices", "hydra", *IRRELEVANT, *(f"trainer.{key}" for key in IRRELEVANT_TRAINER))
ABSENT = "—"


@dataclass(frozen=True)
class Group:
    """Runs with equal settings up to the seed."""

    label: str
    block: str
    varied: dict[str, Any]  # the settings in which this group differs from some other group
    runs: tuple[Run, ...]

    @property
    def family(self) -> str:
        """polar of polar_tangent: blocks that are steps on the way to one block."""
        return self.block.partition("_")[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    def surroundings(self) -> tuple[tuple[str, str], ...]:
        """What varies outside the block: a block is compared with its baseline in equal surroundings."""
        return tuple((k, repr(v)) for k, v in sorted(self.varied.items()) if k.partition(".")[0] != "block")


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Every setting in which the runs differ (seed and names aside), with one value per run; absent ones are None."""
    keys = {key for run in runs for key in run.settings if _is_compared(key)}
    rows = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in sorted(rows.items()) if any(v != values[0] for v in values)}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by block and by everything that varies except the seed, baseline-like blocks first."""
    varying = _varying_choices(runs)
    members: dict[tuple[str, str], list[Run]] = {}
    settings: dict[tuple[str, str], dict[str, Any]] = {}
    keys_among: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        varied: dict[str, Any] = {part: _choice(run, part) for part in varying if part != "block"}
        for part in (*varying, ""):
            # The settings of a choice (d_model of model=tiny) vary only if runs with that same choice differ in them.
            peers = [r for r in runs if not part or _choice(r, part) == _choice(run, part)]
            at = (part, _choice(run, part) if part else "")
            if at not in keys_among:
                keys_among[at] = [k for k in config_differences(peers) if _part(k, varying) == part]
            varied |= {key: run.settings.get(key) for key in keys_among[at]}
        label = " · ".join([run.block, *_words(varied)])
        members.setdefault((run.block, label), []).append(run)
        settings[run.block, label] = varied
    groups = [
        Group(label, block, settings[block, label], tuple(sorted(found, key=lambda r: (r.seed, r.name))))
        for (block, label), found in members.items()
    ]
    order = ("standard", "xsa", "rfa", "polar")
    return sorted(
        groups, key=lambda g: (order.index(g.family) if g.family in order else len(order), g.family, g.block, g.label)
    )


def short_key(key: str) -> str:
    """The last part of a dotted key, which is what people type and remember."""
    return key.rpartition(".")[2]


def show(value: Any) -> str:
    """A setting's value as a person would write it."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(show(item) for item in value)}]"
    return str(value)


def _words(varied: dict[str, Any]) -> list[str]:
    # trainer.max_steps and schedule.max_steps often move together: say one of them.
    words: dict[str, str] = {}
    for key, value in varied.items():
        if value is None or isinstance(value, (dict, list)):
            continue
        words.setdefault(f"{short_key(key)}={show(value)}", key)
    return list(words)


def _is_compared(key: str) -> bool:
    return not any(key == never or key.startswith(f"{never}.") for never in NEVER_COMPARED)


def _choice(run: Run, part: str) -> str:
    return run.block if part == "block" else str((run.config.get("choices") or {}).get(part))


def _varying_choices(runs: Sequence[Run]) -> list[str]:
    """The config groups of which the runs made different choices; `block` always counts as one."""
    parts = {
        part for run in runs for part in (run.config.get("choices") or {}) if "/" not in part and _is_compared(part)
    }
    return ["block", *sorted(p for p in parts - {"block"} if len({_choice(run, p) for run in runs}) > 1)]


def _part(key: str, parts: Sequence[str]) -> str:
    top = key.partition(".")[0]
    return top if top in parts else ""
