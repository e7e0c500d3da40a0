"""`python -m polarlm data prepare|info|sample|verify`: prepared corpora for people."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.corpus import Corpus, build_corpus, find_damage, prepared_corpus
from polarlm.data.order import Permutation, key
from polarlm.data.store import TokenStore
from polarlm.errors import UserError
from polarlm.printing import aligned

_BAR = 40


def add_parser(verbs: Any) -> None:
    """Add the verb `data` with its own verbs."""
    data = verbs.add_parser("data", help="prepare and inspect a corpus: prepare, info, sample, verify")
    actions = data.add_subparsers(title="actions", metavar="action", required=True)
    for name, run, purpose in (
        ("prepare", prepare, "tokenise a corpus into the cache (training does it by itself when needed)"),
        ("info", info, "documents, tokens, bytes per token, leakage, document lengths"),
        ("sample", sample, "random documents, decoded"),
        ("verify", verify_corpus, "compare every stored file with its checksum"),
    ):
        action = actions.add_parser(name, help=purpose, description=purpose)
        action.add_argument(
            "choices", nargs="*", metavar="key=value", help="as for train.py: data=wikitext2 tokenizer=gpt2 data.path=…"
        )
        action.set_defaults(run=run)
        if name == "sample":
            action.add_argument("--split", default="train", choices=("train", "val", "test"))
            action.add_argument("--count", type=int, default=3, help="number of documents")
            action.add_argument("--tokens", type=int, default=200, help="at most so many tokens of each")
            action.add_argument("--seed", type=int, default=0)
        if name == "verify":
            action.add_argument("--repair", action="store_true", help="rebuild damaged sections from the source")


def data_settings(choices: list[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(data, tokenizer, cache folder) of a train configuration with these choices, checked as train.py checks them."""
    from polarlm.launch.overrides import config_loader, plan_jobs

    config = plan_jobs(config_loader(), "train", choices, multirun=False).jobs[0].config
    assert config is not None  # a single job that is wrong has been refused
    return config["data"], config["tokenizer"], config["cache_dir"]


def prepare(options: argparse.Namespace) -> int:
    """Prepare a corpus and print what is in it."""
    corpus = build_corpus(*data_settings(options.choices))
    print(corpus_table(corpus))
    return 0


def info(options: argparse.Namespace) -> int:
    """Print everything known about a corpus, with a histogram of document lengths."""
    corpus = build_corpus(*data_settings(options.choices))
    print(corpus_table(corpus))
    for split in corpus.splits:
        print(f"\ntokens per document, {split}")
        print(histogram(document_lengths(corpus.store(split))))
    return 0


def sample(options: argparse.Namespace) -> int:
    """Print a few random documents of a split."""
    for name in ("count", "tokens"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)} must be at least 1.")
    corpus = build_corpus(*data_settings(options.choices))
    store = corpus.store(options.split)
    starts = store.document_starts(0, len(store))
    count = min(options.count, len(starts))
    for place in Permutation(len(starts), key(options.seed))(np.arange(count)).tolist():
        begin = int(starts[place])
        end = int(starts[place + 1]) if place + 1 < len(starts) else len(store)
        shown = store[begin : min(end, begin + options.tokens)]
        more = f" (first {len(shown):,} shown)" if len(shown) < end - begin else ""
        print(f"--- {options.split} document {place:,}: {end - begin:,} tokens{more}")
        print(corpus.tokenizer.decode(shown.tolist()))
    return 0


def verify_corpus(options: argparse.Namespace) -> int:
    """Compare a prepared corpus with its checksums; exit code 1 if something is damaged."""
    chosen = data_settings(options.choices)
    corpus = prepared_corpus(*chosen)
    if corpus is None:
        print("not prepared yet; run: python -m polarlm data prepare " + " ".join(options.choices))
        return 1
    parts = [part for part, _ in corpus.parts] or [corpus]
    damaged = {
        str(part.folder / file): what for part in parts for file, what in find_damage(part, thorough=True).items()
    }
    if not all(part.tokenizer_intact() for part in parts):
        print(
            f"damaged: the tokenizer is not the one the tokens were made with; delete {corpus.folder} and prepare again"
        )
        return 1
    if not damaged:
        shards = sum(len(split["shards"]) for split in corpus.manifest["splits"].values())
        print(
            f"{corpus.name}: {shards} shards, {sum(len(corpus.store(s)) for s in corpus.splits):,} tokens, all intact"
        )
        return 0
    for file, what in damaged.items():
        print(f"damaged: {what} ({Path(file).parent})")
    if not options.repair:
        print("rebuild them with --repair")
        return 1
    for part in parts:
        (part.folder / "verified.json").unlink(missing_ok=True)
        for shard in (shard for split in part.manifest["splits"].values() for shard in split["shards"]):
            if str(part.folder / shard["file"]) in damaged:
                (part.folder / shard["file"]).unlink(missing_ok=True)
    rebuilt = build_corpus(*chosen)
    left = [file for part in [p for p, _ in rebuilt.parts] or [rebuilt] for file in find_damage(part, thorough=True)]
    print("repaired" if not left else f"still damaged: {', '.join(left)}")
    return 1 if left else 0


def corpus_table(corpus: Corpus) -> str:
    """Splits, tokenizer and leakage as aligned text."""
    described = corpus.describe()
    rows = [("split", "documents", "tokens", "bytes", "bytes/token", "unknown")]
    for split, numbers in described["splits"].items():
        counts = [f"{numbers[k]:,}" for k in ("documents", "tokens", "bytes")]
        rows.append((split, *counts, f"{numbers['bytes_per_token']:.4f}", f"{numbers['unknown']:,}"))
    lines = aligned(rows, first_left=False)
    tokenizer = described["tokenizer"]
    lines.append(
        f"tokenizer {tokenizer['kind']}, {tokenizer['vocab_size']:,} ids; fingerprint {corpus.fingerprint[:12]}"
    )
    lines += _leakage_lines(described["leakage"])
    if any(numbers["unknown"] for numbers in described["splits"].values()):
        lines.append("unknown tokens stand for text that is lost: bits per byte count them as if they were known")
    if corpus.manifest.get("empty_documents"):
        lines.append(f"{corpus.manifest['empty_documents']:,} empty documents left out")
    size = sum(file.stat().st_size for file in corpus.folder.rglob("*") if file.is_file())
    lines.append(f"in {os.path.relpath(corpus.folder)} ({size / 1e6:.1f} MB)")
    return "\n".join(lines)


def _leakage_lines(leakage: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for name, entry in leakage.items():
        if name not in ("val", "test"):  # a mixture has one report per part
            lines += _leakage_lines(entry, f"{name} ")
            continue
        for what, numbers in entry.items():
            share = f" ({numbers['in_train'] / numbers['checked']:.1%})" if numbers["in_train"] else ""
            lines.append(
                f"{prefix}{name}: {numbers['in_train']:,} of {numbers['checked']:,} {what} also in train{share}"
            )
    return lines


def document_lengths(store: TokenStore) -> np.ndarray:
    """Tokens of every document of a split."""
    starts = store.document_starts(0, len(store))
    return np.diff(np.append(starts, len(store)))


def histogram(lengths: np.ndarray) -> str:
    """Counts per power of two, as text."""
    powers = np.bincount(np.frexp(np.maximum(lengths, 1))[1] - 1)
    lines = []
    for power in range(int(np.flatnonzero(powers)[0]) if powers.any() else 0, len(powers)):
        bar = "█" * round(_BAR * powers[power] / powers.max())
        lines.append(f"{2**power:>12,} – {2 ** (power + 1) - 1:<12,} {powers[power]:>10,} {bar}")
    return "\n".join(lines)
