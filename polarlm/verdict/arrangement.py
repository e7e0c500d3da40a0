"""Who is compared with whom: baselines in equal surroundings, and the rungs of a ladder."""

import itertools
from collections.abc import Sequence

from polarlm.errors import UserError, did_you_mean
from polarlm.verdict.groups import Group, settings_apart


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
