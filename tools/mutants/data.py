"""Bugs on the way from text to batches."""

# ruff: noqa: E501
# fmt: off
from tools.mutants.mutant import mutants

D = "polarlm/data/"
T = "tests/data/"

MUTANTS = [
    *mutants(
        f"{D}order/windows.py",
        f"{T}order/test_batches.py",
        ("EpochOrder((len(store) - 1) // context, seed)", "EpochOrder((len(store) - 1) // context - 1, seed)", "the last training window is dropped"),
        ("phases = {epoch: key(self.seed, epoch, 1) % self.context for", "phases = {epoch: 0 for", "the epoch's phase is ignored"),
        ("len(self.store) - 1 - self.context)", "len(self.store) - 2 - self.context)", "the last token is never a target"),
        ("return window[:, :-1], window[:, 1:], None", "return window[:, :-1], window[:, :-1], None", "targets are the tokens themselves"),
        ("self.store.document_starts(b + 1, b + 1 + self.context)", "self.store.document_starts(b, b + self.context)", "counted targets are one off at a border"),
    ),
    *mutants(
        f"{D}order/batches.py",
        f"{T}order/test_batches.py",
        ("first = (index * world + rank) * micro_batch", "first = index * world * micro_batch", "every rank gets the same sequences"),
        ("step, counted = -1, torch.tensor(0.0)", "step, counted = 0, torch.tensor(1.0)", "the first step's count is wrong"),
        ("total = int(sequences.counted(np.arange(step * size, (step + 1) * size)).sum())", "total = int(sequences.counted(np.arange(step * size, step * size + micro_batch)).sum()) * accumulate * world", "counted targets of one micro-batch stand for all"),
        ("self.windows = -(-(self.length - 1) // context)", "self.windows = (self.length - 1) // context", "evaluation leaves out the last window"),
        ("first = (number * self.world + self.rank) * self.micro_batch", "first = number * self.world * self.micro_batch", "every rank evaluates the same windows"),
    ),
    *mutants(
        f"{D}order/sequences.py",
        f"{T}order/test_batches.py",
        ("key(self.seed, int(epoch))", "key(self.seed, 0)", "every epoch has the same order"),
        ("key(self.seed, int(epoch))", "key(0, int(epoch))", "every seed has the same order"),
        ("np.where(ids[:, 1:] == ids[:, :-1], targets, IGNORED)", "targets", "targets beyond a document's end count"),
    ),
    *mutants(
        f"{D}order/permutation.py",
        f"{T}order/test_permutation.py",
        ("_ROUNDS = 6", "_ROUNDS = 1", "a permutation that hardly permutes"),
        ("result[outside] = self._network(result[outside])", "result[outside] = result[outside] % _U(self.size)", "not a permutation"),
    ),
    *mutants(
        f"{D}order/packing.py",
        f"{T}order/test_packing.py",
        ("targets = np.minimum(left - 1, context)", "targets = np.minimum(left, context)", "the last token of a document has a target of the next"),
        ("if length > room:", "if length > room + 1:", "a sequence holds more than the context"),
        ("documents[row, at : at + length] = number", "documents[row, at : at + length] = 0", "packed documents see each other"),
        ("for chunk in np.argsort(-lengths, kind=\"stable\").tolist():", "for chunk in range(len(lengths)):", "best fit without sorting"),
    ),
    *mutants(
        f"{D}order/mixture.py",
        f"{T}order/test_mixture.py",
        ("return owners, periods * self.quotas[owners] + slots - self._first[owners]", "return owners, slots - self._first[owners]", "every period repeats the same sequences"),
        ("shares = np.asarray(weights, float) / np.sum(weights) * _PERIOD", "shares = np.ones(len(parts)) / len(parts) * _PERIOD", "weights of a mixture are ignored"),
    ),
    *mutants(
        f"{D}store/build.py",
        f"{T}tokenizers/test_tokenizers.py {T}store/test_store.py",
        ("if piece.split == \"train\" or not train_only:", "if True:", "the BPE is trained on validation text too"),
    ),
    *mutants(
        f"{D}store/tokens.py",
        f"{T}store/test_store.py",
        ("starts = self.document_starts(begin + 1, begin + length)", "starts = self.document_starts(begin, begin + length)", "a window at a document's start counts it twice"),
        ("first = bisect_right(self._offsets, begin) - 1\n        if end", "first = 0\n        if end", "windows are read from the first shard"),
    ),
    *mutants(
        f"{D}store/leakage.py",
        f"{T}store/test_build.py::test_leakage_is_found_across_sections {T}store/test_store.py",
        ("hit |= np.isin(unique, _load(folder, \"train\", what, number))", "hit = np.isin(unique, _load(folder, \"train\", what, number))", "only the last section of train is searched for leaks"),
        ("\"in_train\": int(counts[hit].sum())", "\"in_train\": int(hit.sum())", "repeated leaks are counted once"),
    ),
    *mutants(
        f"{D}read/splits.py",
        f"{T}read/test_splits.py",
        ("beginning = text[:16384].encode().translate(None, b\" \\t\\n\\r\\x0b\\x0c\")[:8192]", "beginning = text[:16384].encode()[:8192]", "copies with other white space land in other splits"),
        ("train_end = int(total * (1 - config.val - config.test))", "train_end = int(total * (1 - config.val))", "test text is trained on"),
        ("raw[position] & 0xC0 == 0x80", "raw[position] & 0x80 == 0x80", "a cut moves past whole characters"),
        ("piece = replace(piece, text=raw.decode(), last=True)", "pass", "max_bytes does not cut the last document"),
    ),
]
