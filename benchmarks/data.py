"""What preparing and reading data costs, as ratios within one run: reading windows, tokenising, memory.

    python -m benchmarks.data windows     random windows of the store against a bare np.memmap loop
    python -m benchmarks.data tokenise    our path against a bare `tokenizers` encode_batch loop (MB/s)
    python -m benchmarks.data identity    ids of both on every document of the test corpora (minutes)
    python -m benchmarks.data memory      peak memory of preparing 1× and 100× the text

The real texts come from $POLARLM_SHARED_DATA (or data/raw).
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polarlm.data import build_corpus
from polarlm.data.module import train_batches
from polarlm.data.order import WindowSequences
from polarlm.data.readers import pieces_of
from polarlm.data.store import TokenStore
from polarlm.data.tokenizer import SubwordTokenizer

SHARED = Path(os.environ.get("POLARLM_SHARED_DATA", "data/raw"))


def alternate(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Median seconds of two things done in turn, so that the ratio does not see the machine's mood."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, taken in zip((first, second), times):
            begin = clock()
            run()
            taken.append(clock() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def windows(context: int = 1024, batch: int = 16, count: int = 50) -> dict[str, float]:
    """Batches of (tokens, targets) from 50 M tokens in four shards, against a bare np.memmap."""
    with tempfile.TemporaryDirectory() as folder:
        shards = []
        for number in range(4):
            ids = np.random.default_rng(number).integers(0, 50_257, 12_500_000).astype("<u2")
            ids.tofile(f"{folder}/{number}.bin")
            Path(f"{folder}/{number}.docs").touch()
            shards.append(
                {"file": f"{number}.bin", "documents_file": f"{number}.docs", "tokens": len(ids), "sha256": ""}
            )
        with open(f"{folder}/all.bin", "wb") as whole:
            for number in range(4):
                whole.write(Path(f"{folder}/{number}.bin").read_bytes())
        store = TokenStore(folder, "train", {"shards": shards, "documents": 0, "bytes": 0}, "<u2")
        ours = train_batches(WindowSequences(store, context, seed=1), batch)
        mapped = np.memmap(f"{folder}/all.bin", "<u2", "r")
        chance = np.random.default_rng(0)

        def bare() -> None:
            for _ in range(count):
                begins = chance.integers(0, len(mapped) - context - 1, batch)
                torch.from_numpy(np.stack([mapped[i : i + context].astype(np.int64) for i in begins]))
                torch.from_numpy(np.stack([mapped[i + 1 : i + 1 + context].astype(np.int64) for i in begins]))

        def store_batches() -> None:
            for _ in range(count):
                next(ours)

        bare()
        store_batches()
        slow, fast = alternate(bare, store_batches, 15)
    tokens = count * batch * context
    return {"memmap Mtok/s": tokens / slow / 1e6, "store Mtok/s": tokens / fast / 1e6, "time ratio": fast / slow}


def texts_of(name: str) -> list[str]:
    """Documents of one of the test corpora."""
    path = SHARED / name
    raw = (lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode()
    return [json.loads(line)["text"] for line in raw.splitlines()] if ".jsonl" in name else [raw]


def tokenise(megabytes: float = 4.0) -> dict[str, float]:
    """GPT-2's vocabulary on novels: our path (tiktoken, threads) against encode_batch with all its threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = SubwordTokenizer.from_file(SHARED / "gpt2-tokenizer")
    pieces = [p.text for text in texts_of("gutenberg_dev.jsonl.xz") for p in pieces_of([text], 8192)]
    chosen = pieces[:: max(1, int(sum(map(len, pieces)) / (megabytes * 1e6)))]
    size = sum(len(text.encode()) for text in chosen) / 1e6
    groups = [chosen[i : i + 128] for i in range(0, len(chosen), 128)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def theirs() -> None:
            tokenizer._library.encode_batch(chosen, add_special_tokens=False)

        def ours() -> None:
            list(pool.map(tokenizer.encode_batch, groups))

        slow, fast = alternate(theirs, ours, 3)
        # Processor time is what counts on a machine that others use as well.
        slow_cpu, fast_cpu = alternate(theirs, ours, 3, time.process_time)
    return {
        "megabytes": size, "encode_batch MB/s": size / slow, "ours MB/s": size / fast, "speed-up": slow / fast,
        "encode_batch MB per CPU second": size / slow_cpu, "ours MB per CPU second": size / fast_cpu,
        "speed-up in CPU time": slow_cpu / fast_cpu,
    }  # fmt: skip


def identity() -> dict[str, float]:
    """Compare every id of every test corpus."""
    tokenizer = SubwordTokenizer.from_file(SHARED / "gpt2-tokenizer")
    names = [
        "tinyshakespeare/input.txt",
        "tinystories/tiny_stories.txt",
        "lambada/lambada_dev.jsonl",
        "wikitext-2-raw/wiki.valid.raw.xz",
        "wikitext-2/train.txt.xz",
        "gutenberg_dev.jsonl.xz",
        "enwik8/enwik8-first20m.xz",
    ]
    counts = {"documents": 0, "tokens": 0, "different documents": 0}
    for name in names:
        for text in texts_of(name):
            # The library is quadratic on long texts; pieces of any size have the ids of the whole (tests/data).
            pieces = [piece.text for piece in pieces_of([text], 65536)]
            slow = [i for ids in tokenizer.encode_slowly(pieces) for i in ids]
            fast = np.concatenate([tokenizer.encode_array(piece.text) for piece in pieces_of([text])])
            counts["documents"] += 1
            counts["tokens"] += len(slow)
            counts["different documents"] += not np.array_equal(fast, slow)
        print(name, counts, flush=True)
    return {name: float(count) for name, count in counts.items()}


def memory(small: int = 8) -> dict[str, float]:
    """Peak resident memory (MB) of processes that prepare `small` MB and 100 times that, with GPT-2's vocabulary."""
    result: dict[str, float] = {}
    novels = "".join(texts_of("gutenberg_dev.jsonl.xz"))[: small * 1_000_000]
    documents = [novels[i : i + 4000] for i in range(0, len(novels), 4000)]
    with tempfile.TemporaryDirectory() as folder:
        for times in (1, 100):
            path = Path(folder, f"{times}.jsonl")
            with open(path, "w") as file:
                for again in range(times):
                    file.writelines(json.dumps({"text": f"{again} {text}"}) + "\n" for text in documents)
            code = f"import benchmarks.data as b; b.peak({str(path)!r}, {folder!r})"
            answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            result |= {f"{times}× {name}": value for name, value in json.loads(answer.splitlines()[-1]).items()}
    return result


def peak(path: str, folder: str) -> None:
    """Prepare a file in this process and print text size, seconds and peak memory."""
    from benchmarks.memory import resident

    begin = time.perf_counter()
    gpt2 = {"kind": "file", "path": str(SHARED / "gpt2-tokenizer")}
    corpus = build_corpus({"path": path, "split": {"rule": "hash", "val": 0.01}}, gpt2, f"{folder}/cache")
    size = sum(corpus.store(split).bytes for split in corpus.splits) / 1e6
    seconds = time.perf_counter() - begin
    used = resident("VmHWM")
    print(json.dumps({"text MB": size, "seconds": seconds, "MB/s": size / seconds, "peak MB": used}))


def main() -> None:
    """Run one measurement and print it as aligned text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "windows": windows,
        "tokenise": tokenise,
        "identity": identity,
        "memory": memory,
    }
    parser.add_argument("kind", choices=kinds)
    for name, value in kinds[parser.parse_args().kind]().items():
        print(f"{name:>31}  {value:,.3f}")


if __name__ == "__main__":
    main()
