"""Group runs that differ only in their seed, name the settings in which groups differ, and choose baselines."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.errors import UserError, did_you_mean
from polarlm.locations import shipped_default
from polarlm.runs.identity import IRRELEVANT, IRRELEVANT_TRAINER, SOLVED
from polarlm.runs.reading import Run

# Where and under which name a run was made says nothing about what it is.
NEVER_COMPARED = ("seed", "choices", "hydra", *IRRELEVANT, *(f"trainer.{key}" for key in IRRELEVANT_TRAINER))
ABSENT = "—"
MANY_SETTINGS = 3  # from so many varied settings on, a label names only those in which its group is unusual


@dataclass(frozen=True)
class Group:
    """Runs with equal settings up to the seed."""

    label: str
    block: str
    varied: dict[str, Any]  # the settings in which this group differs from some other group
    runs: tuple[Run, ...]
    is_default: bool = False  # every varied setting has its shipped value

    @property
    def family(self) -> str:
        """polar of polar_tangent: blocks that are steps on the way to one block."""
        return self.block.partition("_")[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    def surroundings(self) -> tuple[tuple[str, str], ...]:
        """What varies outside the block: a block is compared with its baseline in equal surroundings.

        What `match=` solved makes surroundings equal and not different.
        """
        solved = {SOLVED.get(str(run.config.get("match"))) for run in self.runs}
        return tuple(
            (k, repr(v)) for k, v in sorted(self.varied.items()) if k.partition(".")[0] != "block" and k not in solved
        )


def config_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Every setting in which the runs differ (seed and names aside), with one value per run; absent ones are None."""
    keys = {key for run in runs for key in run.settings if is_compared(key)}
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
        # A group is what all its settings say; its label may leave some of them out.
        group = (run.block, json.dumps(varied, sort_keys=True, default=str))
        members.setdefault(group, []).append(run)
        settings[group] = varied
    distinguishing = _distinguishing([(block, settings[block, text]) for block, text in members])
    usual = {
        block: _usual([(settings[b, text], runs) for (b, text), runs in members.items() if b == block], distinguishing)
        for block in {block for block, _ in members}
    }

    def label(block: str, text: str) -> str:
        told_apart = {k: v for k, v in settings[block, text].items() if k in distinguishing}
        return " · ".join([block, *_words(told_apart, usual[block])])

    groups = [
        Group(
            label(block, text),
            block,
            settings[block, text],
            tuple(sorted(runs_of_group, key=lambda r: (r.seed, r.name))),
            all(_is_default(key, value, runs_of_group[0]) for key, value in settings[block, text].items()),
        )
        for (block, text), runs_of_group in members.items()
    ]
    order = ("standard", "xsa", "rfa", "polar")

    heads = {group.family: group for group in groups if group.block == group.family}

    def place(group: Group) -> tuple:
        rank = order.index(group.family) if group.family in order else len(order)
        head = heads.get(group.family)
        steps = settings_apart(group, head) if head else 0
        # Baselines grow from the plain one; other families climb step by step to the block they are named after.
        climb = steps if group.family == order[0] else -steps
        values = [_sortable(group.varied[key]) for key in sorted(group.varied)]
        return (rank, group.family, climb if group.block != group.family or not values else 0, group.block, values)

    return sorted(groups, key=place)


def _distinguishing(groups: Sequence[tuple[str, dict[str, Any]]]) -> set[str]:
    """The settings that a label must name: those that differ among groups of one block.

    A setting that follows from the block (each block's own learning rate) stands once, in the caption.
    """
    by_values = {key for key in _keys(groups) if _differs(key, groups, absent=False)}
    apart = {(block, repr([varied.get(key) for key in sorted(by_values)])) for block, varied in groups}
    # That a group does not have a setting at all is only named where nothing else tells it from another.
    return by_values if len(apart) == len(groups) else {key for key in _keys(groups) if _differs(key, groups)}


def _keys(groups: Sequence[tuple[str, dict[str, Any]]]) -> set[str]:
    return {key for _, varied in groups for key in varied}


def _differs(key: str, groups: Sequence[tuple[str, dict[str, Any]]], absent: bool = True) -> bool:
    """Whether groups of one block have several values of a setting (its absence counts as one, or not)."""
    values: dict[str, set[str]] = {}
    for block, varied in groups:
        if absent or varied.get(key) is not None:
            values.setdefault(block, set()).add(repr(varied.get(key)))
    return any(len(seen) > 1 for seen in values.values())


def _usual(groups: Sequence[tuple[dict[str, Any], Sequence[Run]]], said: set[str]) -> dict[str, Any]:
    """What most groups of a block have of the settings in which they differ, where labels of all would be too long.

    With one or two such settings (a curve, a grid) every label says them and this is empty. Of equally frequent values
    the shipped one is the usual one.
    """
    columns = {key: [varied.get(key) for varied, _ in groups] for key in sorted(said)}
    columns = {key: values for key, values in columns.items() if any(v != values[0] for v in values)}
    if len({tuple(map(repr, values)) for values in columns.values()}) < MANY_SETTINGS:
        return {}
    run = groups[0][1][0]
    return {
        key: max(values, key=lambda v: (sum(v == other for other in values), _is_default(key, v, run)))
        for key, values in columns.items()
    }


def usual_settings(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """block → the settings that its labels leave unsaid because most of its groups have them."""
    said = _distinguishing([(g.block, g.varied) for g in groups])
    unsaid = {
        block: _usual([(g.varied, g.runs) for g in groups if g.block == block], said)
        for block in dict.fromkeys(g.block for g in groups)
    }
    return {block: usual for block, usual in unsaid.items() if usual}


def settings_apart(a: Group, b: Group) -> int:
    """In how many of the block's own settings two groups differ."""
    ours, theirs = ({k: v for k, v in g.runs[0].settings.items() if k.startswith("block.")} for g in (a, b))
    return sum(ours.get(key) != theirs.get(key) for key in ours.keys() | theirs.keys())


def follows_from_block(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """setting → block → value, of settings that vary but are left out of the labels because the block decides them."""
    distinguishing = _distinguishing([(g.block, g.varied) for g in groups])
    keys = sorted({key for g in groups for key in g.varied} - distinguishing)
    return {key: {g.block: g.varied.get(key) for g in groups} for key in keys if not key.startswith("block.")}


def shared_settings(groups: Sequence[Group]) -> dict[str, Any]:
    """Every setting that all runs have in common."""
    first = groups[0].runs[0].settings
    others = [run.settings for group in groups for run in group.runs]
    return {k: v for k, v in first.items() if is_compared(k) and all(o.get(k) == v for o in others)}


def varied_number(groups: Sequence[Group]) -> str | None:
    """The one numeric setting in which groups of one block differ, for a response curve; None when there is no such."""
    keys = _distinguishing([(g.block, g.varied) for g in groups])
    # trainer.max_steps and schedule.max_steps move together.
    columns = {tuple(repr(g.varied.get(key)) for g in groups): key for key in sorted(keys, reverse=True)}
    if len(columns) != 1:
        return None
    key = next(iter(columns.values()))
    if key == "model":  # named sizes that differ in their width
        key = "model.d_model"
    values = [varied_value(g, key) for g in groups]
    known = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return key if len(set(known)) >= 3 else None


def varied_value(group: Group, key: str) -> Any:
    """A group's value of a varied setting, also of one that follows from a varied choice."""
    return group.varied.get(key, group.runs[0].settings.get(key))


def _is_default(key: str, value: Any, run: Run) -> bool:
    default = shipped_default(key, run.config.get("choices") or {})
    return default is not None and default == value


def _sortable(value: Any) -> tuple:
    """Numbers as numbers, before words, before what is absent."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (0, value, "")
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


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


def _words(varied: dict[str, Any], usual: dict[str, Any]) -> list[str]:
    # trainer.max_steps and schedule.max_steps often move together: say one of them.
    words: dict[str, str] = {}
    for key, value in varied.items():
        if key in usual and value == usual[key]:
            continue
        if (value is None and key not in usual) or isinstance(value, (dict, list)):
            continue
        words.setdefault(f"{short_key(key)}={show(value)}", key)
    return list(words)


def is_compared(key: str) -> bool:
    """Whether a setting says what a run is, and not where it was made, under which name or with which seed."""
    return not any(key == never or key.startswith(f"{never}.") for never in NEVER_COMPARED)


def _choice(run: Run, part: str) -> str:
    return run.block if part == "block" else str((run.config.get("choices") or {}).get(part))


def _varying_choices(runs: Sequence[Run]) -> list[str]:
    """The config groups of which the runs made different choices; `block` always counts as one."""
    parts = {
        part for run in runs for part in (run.config.get("choices") or {}) if "/" not in part and is_compared(part)
    }
    return ["block", *sorted(p for p in parts - {"block"} if len({_choice(run, p) for run in runs}) > 1)]


def _part(key: str, parts: Sequence[str]) -> str:
    top = key.partition(".")[0]
    return top if top in parts else ""


def choose_baselines(groups: Sequence[Group], wanted: str | None) -> list[Group | None]:
    """The baseline of every group: the wanted (or `standard`) block in equal surroundings, else the only candidate."""
    if len(groups) < 2:
        return [None] * len(groups)
    if wanted is not None:
        candidates = [g for g in groups if wanted in (g.block, g.label)] or [g for g in groups if wanted in g.label]
        if not candidates:
            labels = [g.label for g in groups]
            raise UserError(
                f"--baseline {wanted!r} is no block or group here. {did_you_mean(wanted, labels)}"
                f"Choose one of: {', '.join(labels)}"
            )
    else:
        # `groups` is sorted with the standard block first.
        candidates = [g for g in groups if g.block == groups[0].block]
        if len(candidates) == len(groups):  # an ablation of one block: the block as shipped, else its first variant
            candidates = [g for g in groups if g.is_default][:1] or candidates[:1]
    baselines: list[Group | None] = []
    for group in groups:
        alike = [c for c in candidates if c is group] or [
            c for c in candidates if c.surroundings() == group.surroundings()
        ]
        baselines.append(alike[0] if alike else candidates[0] if len(candidates) == 1 else None)
    return baselines


def ladder(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """(rung, next rung) of a ladder: blocks of which each is a setting or two nearer to the last one; else nothing.

    `groups` are sorted so that a family climbs to the block it is named after. Baselines of the standard family are the
    first rungs where nothing else is on the page.
    """
    steps: list[tuple[int, int]] = []
    families = list(dict.fromkeys(g.family for g in groups))
    for family in families:
        members = [i for i, g in enumerate(groups) if g.family == family]
        is_chain = len(members) >= 3 and groups[members[-1]].block == family and family != "standard"
        if not is_chain or len({groups[i].block for i in members}) < len(members):
            continue
        pairs = list(itertools.pairwise(members))
        if all(settings_apart(groups[a], groups[b]) <= 2 for a, b in pairs):
            before = [i for i, g in enumerate(groups) if g.family == "standard"] if len(families) == 2 else []
            steps += [*itertools.pairwise([*before, members[0]]), *pairs]
    return steps
