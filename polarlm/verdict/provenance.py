"""May two groups be compared at all? The same text (by fingerprint, not by name), the same tokens, the same code."""

import json
from collections.abc import Sequence
from typing import Any

from polarlm.runs.files import json_object
from polarlm.runs.reading import Run
from polarlm.verdict.groups import Group


def different_text(group: Group, against: Group) -> str | None:
    """Why the two groups did not read the same text, or None; also within a group all runs must have."""
    corpora = [corpus for run in (*group.runs, *against.runs) if (corpus := _corpus(run))]
    # The fingerprint covers the tokenizer too; runs of different tokenizers are held to documents and bytes.
    one_tokenizer = len({json.dumps(c.get("tokenizer"), sort_keys=True) for c in corpora}) <= 1
    prints = [c["fingerprint"] if one_tokenizer else _sizes(c) for c in corpora]
    if len(set(prints)) <= 1:
        return None
    ours = {p["fingerprint"][:12] for run in group.runs if (p := _corpus(run))}
    theirs = {p["fingerprint"][:12] for run in against.runs if (p := _corpus(run))}
    names = {str((run.config.get("choices") or {}).get("data")) for run in (*group.runs, *against.runs)}
    called = f" although both are called {names.pop()}" if len(names) == 1 else ""
    return (
        f"the text differs{called} (corpus fingerprints {', '.join(sorted(ours))} against {', '.join(sorted(theirs))})."
    )


def version_notes(runs: Sequence[Run]) -> list[str]:
    """Sentences about runs made by different code or different torch versions."""
    notes = []
    environments = [json_object(run.folder / "environment.json") for run in runs]
    commits = sorted({str(e["git_commit"])[:9] for e in environments if e.get("git_commit")})
    if len(commits) > 1:
        notes.append(f"The runs were made by {len(commits)} versions of the code ({', '.join(commits[:4])}).")
    torches = sorted({str((e.get("versions") or {}).get("torch")) for e in environments if e.get("versions")})
    if len(torches) > 1:
        notes.append(f"The runs were made with different versions of torch ({', '.join(torches[:4])}).")
    changed = sum(bool(e.get("git_dirty")) for e in environments)
    if changed:
        notes.append(f"{changed} of {len(runs)} runs were made by code with uncommitted changes.")
    return notes


def _sizes(corpus: dict[str, Any]) -> str:
    splits = corpus.get("splits") or {}
    return json.dumps({name: (s.get("documents"), s.get("bytes")) for name, s in sorted(splits.items())})


def _corpus(run: Run) -> dict[str, Any]:
    corpus = json_object(run.folder / "corpus.json")
    return corpus if isinstance(corpus.get("fingerprint"), str) else {}
