"""Parts of the page that are words: samples side by side, the progress of a sweep."""

from collections.abc import Sequence
from html import escape

from polarlm.runs.reading import Run
from polarlm.verdict.groups import Group

LONGEST_SAMPLE = 700


def samples(groups: Sequence[Group]) -> str:
    """What a run of each group writes, side by side; of the lowest seed that all groups have where there is one."""
    having = [(g, runs) for g in groups if (runs := [run for run in g.runs if _sample(run)])]
    shared = set.intersection(*({run.seed for run in runs} for _, runs in having)) if having else set()
    cards = []
    for group, runs in having:
        run = next((r for r in runs if shared and r.seed == min(shared)), runs[0])
        text = _sample(run)
        shown = text[:LONGEST_SAMPLE] + ("…" if len(text) > LONGEST_SAMPLE else "")
        cards.append(
            f'<div class="sample"><h3>{escape(group.label)} <small>seed {run.seed}</small></h3>'
            f"<blockquote>{escape(shown)}</blockquote></div>"
        )
    if not cards:
        return ""
    options = groups[0].runs[0].settings
    words = [f"temperature {options['sample.temperature']}"] if "sample.temperature" in options else []
    words += [f"top-k {options['sample.top_k']}"] if options.get("sample.top_k") else []
    words += [f"prompt “{options['sample.prompt']}”"] if options.get("sample.prompt") else []
    note = f'<p class="lead">Written at the end of training{escape(": " + ", ".join(words) if words else "")}.</p>'
    return f'<section id="samples"><h2>Samples</h2>{note}<div class="samples">{"".join(cards)}</div></section>'


def progress(groups: Sequence[Group]) -> str:
    """A bar per unfinished run and a count of all; nothing when everything is finished."""
    runs = [run for group in groups for run in group.runs]
    open_ = [run for run in runs if run.status != "finished"]
    if not open_:
        return ""
    rows = []
    for run in open_:
        share, left = _progress(run)
        words = f"{100 * share:.0f} %" if share is not None else "—"
        if left is not None and run.status == "running":
            words += f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"
        bar = f'<progress max="1" value="{share or 0:.3f}" aria-label="{escape(run.name, quote=True)}"></progress>'
        rows.append(f"<tr><td>{escape(run.name)}</td><td>{escape(run.status)}</td><td>{bar}</td><td>{words}</td></tr>")
    done = sum(run.status == "finished" for run in runs)
    head = f"{done} of {len(runs)} runs finished"
    table = f'<div class="scroll"><table class="left progress"><tbody>{"".join(rows)}</tbody></table></div>'
    return f'<section id="progress"><h2>Sweep progress</h2><p class="lead">{head}.</p>{table}</section>'


def _progress(run: Run) -> tuple[float | None, float | None]:
    """(share done, seconds left) as far as they can be told."""
    steps, tokens = run.settings.get("trainer.max_steps"), run.settings.get("trainer.max_tokens")
    at = run.number("tokens") if tokens else None
    goal: float | None = float(tokens) if tokens else None
    if goal is None and isinstance(steps, (int, float)) and len(run.metrics):
        goal, at = float(steps), float(run.metrics.columns["step"][-1])
    if not goal or at is None:
        return None, None
    share, seconds = min(1.0, at / goal), run.number("seconds")
    return share, seconds * (1 - share) / share if seconds and share else None


def _sample(run: Run) -> str:
    text = run.summary.get("sample")
    return text if isinstance(text, str) else ""
