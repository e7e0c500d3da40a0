"""Tasks made of symbols that ask one thing of a block: recall (MQAR), state tracking, selective copying, induction.

An example is one document of exactly `length` symbols. Its answers are a function of its symbols alone, so only the
symbols are stored. Which split an example belongs to is decided by its content: no split contains another's examples.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm.data.order import EpochOrder, mix
from polarlm.errors import UserError
from polarlm.ignored import IGNORED
from polarlm.settings import read_settings, setting

if TYPE_CHECKING:
    from polarlm.data.store import TokenStore

VERSION = 1  # raise it when examples change: prepared ones are then made anew
PADDING = 0  # the id of <eos>, which no example contains
_SPECIAL = ["<eos>", "<unk>"]  # what a word tokenizer needs
_AT_ONCE = 1024
_SHARES = {"test": (0, 1), "val": (1, 2), "train": (2, 10)}  # of ten classes of examples


@dataclass(frozen=True)
class ProbeTask(ABC):
    """A task: its symbols, its examples, and the answer at every position that asks for one."""

    length: int = setting(64, at_least=4, at_most=1 << 16)
    examples: int = setting(40_000, at_least=1, at_most=10**8)
    eval_examples: int = setting(1_000, at_least=1, at_most=10**8)

    @property
    @abstractmethod
    def words(self) -> list[str]:
        """The symbols in the order of their ids."""

    @property
    @abstractmethod
    def counted(self) -> int:
        """How many positions of an example ask for an answer."""

    @abstractmethod
    def draw(self, chance: np.random.Generator, count: int) -> np.ndarray:
        """(count, length) ids of random examples."""

    @abstractmethod
    def answers(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(answers, asked), both (examples, length): the right id at each position, and whether it is asked for."""

    def split(self, name: str) -> Iterator[np.ndarray]:
        """The examples of a split, (some, length) ids at a time; always the same ones."""
        left = self.examples if name == "train" else self.eval_examples
        low, high = _SHARES[name]
        for block in itertools.count():
            drawn = self.draw(np.random.default_rng([VERSION, low, block]), _AT_ONCE)
            kinds = _classes(drawn)
            chosen = drawn[(kinds >= low) & (kinds < high)][:left]
            yield chosen
            left -= len(chosen)
            if not left:
                return

    def texts(self, name: str) -> Iterator[str]:
        """The examples of a split as text, symbols separated by spaces."""
        words = np.array(self.words)
        for examples in self.split(name):
            yield from map(" ".join, words[examples])


@dataclass(frozen=True)
class Recall(ProbeTask):
    """Multi-query associative recall (Arora et al. 2023, "Zoology"): pairs k v, then keys again; what was their value?

    `pairs` keys with their values open the example; later every key comes once more, at distances that follow the
    paper's power law, and its value is asked for. Everything else is the filler ".", as in the paper's figure 2, or
    random symbols (their code's default); a key of the example stays ".", so that every key is asked for once.
    """

    pairs: int = setting(4, at_least=1)
    keys: int = setting(64, at_least=1, at_most=1 << 13)
    random_filler: bool = False

    def __post_init__(self) -> None:
        if self.pairs > self.keys:
            raise UserError(f"data.mqar.pairs={self.pairs} is more than there are keys: data.mqar.keys={self.keys}.")
        if 4 * self.pairs > self.length:
            raise UserError(
                f"data.mqar.pairs={self.pairs} needs data.mqar.length={4 * self.pairs} or more; it is {self.length}."
            )

    @property
    def words(self) -> list[str]:
        return [*_SPECIAL, ".", *(f"k{n}" for n in range(self.keys)), *(f"v{n}" for n in range(self.keys))]

    @property
    def counted(self) -> int:
        return self.pairs

    def draw(self, chance: np.random.Generator, count: int) -> np.ndarray:
        filler, first_key, first_value = 2, 3, 3 + self.keys
        rows = np.arange(count)[:, None]
        keys = first_key + _distinct(chance, count, self.keys, self.pairs)
        values = first_value + _distinct(chance, count, self.keys, self.pairs)
        # Queries stand 2g symbols behind the pairs, g drawn without repetition with p(g) ∝ (g + 1)^(a − 1), a = 0.01.
        gaps = (self.length - 2 * self.pairs) // 2
        law = -0.99 * np.log(np.arange(gaps) + 1.0)
        queries = 2 * self.pairs + 2 * _distinct(chance, count, gaps, self.pairs, law)
        tokens = np.full((count, self.length), filler)
        if self.random_filler:
            drawn = chance.integers(first_key, len(self.words), tokens.shape)
            tokens = np.where((drawn[..., None] == keys[:, None]).any(-1), filler, drawn)
        tokens[:, 0 : 2 * self.pairs : 2], tokens[:, 1 : 2 * self.pairs : 2] = keys, values
        tokens[rows, queries] = keys
        return tokens

    def answers(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = tokens[:, 0 : 2 * self.pairs : 2], tokens[:, 1 : 2 * self.pairs : 2]
        same = tokens[:, :, None] == keys[:, None, :]  # (examples, length, pairs)
        asked = same.any(2)
        asked[:, : 2 * self.pairs] = False
        return np.take_along_axis(values, same.argmax(2), 1), asked


@dataclass(frozen=True)
class Permutations(ProbeTask):
    """State tracking: every symbol is a permutation of n things, the answer is the product of all so far.

    The word problem of a group (Merrill, Petty & Sabharwal 2024, "The Illusion of State in State-Space Models"): S3 and
    S4 are solvable, A5 (the even permutations of five things) and S5 are not, so no block of fixed depth tracks them at
    every length. p201 sends thing 0 to place 2, 1 to 0, 2 to 1.
    """

    group: str = setting("S3", choices=("S3", "S4", "A5", "S5"))

    @cached_property
    def elements(self) -> list[tuple[int, ...]]:
        """The group's permutations, in lexicographic order; the first is the identity."""
        every = itertools.permutations(range(int(self.group[1:])))
        return [element for element in every if self.group[0] == "S" or _is_even(element)]

    @cached_property
    def product(self) -> np.ndarray:
        """(group, group) number of "first a, then b" at [a, b]."""
        number = {element: at for at, element in enumerate(self.elements)}
        return np.array([[number[tuple(b[i] for i in a)] for b in self.elements] for a in self.elements])

    @property
    def words(self) -> list[str]:
        return [*_SPECIAL, *("p" + "".join(map(str, element)) for element in self.elements)]

    @property
    def counted(self) -> int:
        return self.length

    def draw(self, chance: np.random.Generator, count: int) -> np.ndarray:
        return len(_SPECIAL) + chance.integers(0, len(self.elements), (count, self.length))

    def answers(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        states = tokens - len(_SPECIAL)
        for at in range(1, states.shape[1]):
            states[:, at] = self.product[states[:, at - 1], states[:, at]]
        return states + len(_SPECIAL), np.ones(tokens.shape, bool)


@dataclass(frozen=True)
class SelectiveCopying(ProbeTask):
    """Selective copying (Gu & Dao 2023, "Mamba"): symbols among noise, to be said again in their order at the end.

    `remembered` symbols stand at random places among the noise "."; as many ">" close the example, and the answer at
    each is the next of the symbols. Published: 4,096 symbols before the ">", 16 remembered, a vocabulary of 16 with the
    noise. Where a symbol stands must not matter, so what copies by distance alone fails.
    """

    length: int = setting(256, at_least=4, at_most=1 << 16)
    remembered: int = setting(16, at_least=1, at_most=1 << 12)
    symbols: int = setting(15, at_least=1, at_most=1 << 13)

    def __post_init__(self) -> None:
        if 2 * self.remembered > self.length:
            raise UserError(
                f"data.copying.remembered={self.remembered} needs data.copying.length={2 * self.remembered} or more; "
                f"it is {self.length}."
            )

    @property
    def words(self) -> list[str]:
        return [*_SPECIAL, ".", ">", *(f"s{n}" for n in range(self.symbols))]

    @property
    def counted(self) -> int:
        return self.remembered

    def draw(self, chance: np.random.Generator, count: int) -> np.ndarray:
        noise, say, first = 2, 3, 4
        read = self.length - self.remembered
        tokens = np.full((count, self.length), noise)
        tokens[:, read:] = say
        places = np.sort(_distinct(chance, count, read, self.remembered), axis=1)
        tokens[np.arange(count)[:, None], places] = first + chance.integers(0, self.symbols, places.shape)
        return tokens

    def answers(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        read = self.length - self.remembered
        answers, asked = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        asked[:, read:] = True
        answers[:, read:] = tokens[:, :read][tokens[:, :read] > 3].reshape(len(tokens), self.remembered)
        return answers, asked


@dataclass(frozen=True)
class Induction(ProbeTask):
    """Induction heads (Olsson et al. 2022; Gu & Dao 2023): what came after the special symbol the first time?

    Random symbols; the special one, "!", stands once among them and once more at the end, where the symbol that
    followed it is asked for. Published: length 256, a vocabulary of 16 with the special symbol.
    """

    length: int = setting(256, at_least=4, at_most=1 << 16)
    symbols: int = setting(15, at_least=2, at_most=1 << 13)

    @property
    def words(self) -> list[str]:
        return [*_SPECIAL, "!", *(f"s{n}" for n in range(self.symbols))]

    @property
    def counted(self) -> int:
        return 1

    def draw(self, chance: np.random.Generator, count: int) -> np.ndarray:
        special, first = 2, 3
        tokens = first + chance.integers(0, self.symbols, (count, self.length))
        tokens[np.arange(count), chance.integers(0, self.length - 2, count)] = special
        tokens[:, -1] = special
        return tokens

    def answers(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        where = (tokens == 2).argmax(1)
        answers, asked = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        asked[:, -1] = True
        answers[:, -1] = tokens[np.arange(len(tokens)), where + 1]
        return answers, asked


PROBES: dict[str, type[ProbeTask]] = {
    "mqar": Recall,
    "permutations": Permutations,
    "copying": SelectiveCopying,
    "induction": Induction,
}


def describe_probe(task: str, probe: ProbeTask) -> dict[str, Any]:
    """What a store remembers of its task."""
    return {"task": task, "options": asdict(probe)}


def restore_probe(described: dict[str, Any]) -> ProbeTask:
    """The task that a store remembers."""
    return read_settings(PROBES[described["task"]], described["options"], f"data.{described['task']}")


def _distinct(
    chance: np.random.Generator, count: int, among: int, wanted: int, log_weights: np.ndarray | float = 0.0
) -> np.ndarray:
    """(count, wanted) numbers below `among`, drawn without repetition: the largest of Gumbel-perturbed log-weights."""
    return np.argsort(-(log_weights + chance.gumbel(size=(count, among))), axis=1)[:, :wanted]


def _is_even(element: tuple[int, ...]) -> bool:
    """Whether a permutation swaps an even number of pairs."""
    return sum(a > b for a, b in itertools.combinations(element, 2)) % 2 == 0


def _classes(examples: np.ndarray) -> np.ndarray:
    """A class from 0 to 9 for every example, by its content alone."""
    state = np.zeros(len(examples), np.uint64)
    for column in examples.T:
        state = mix(state ^ column.astype(np.uint64))
    return (state % np.uint64(10)).astype(np.int64)


class ExampleSequences:
    """All examples of a split in every epoch, in an order of its own; padded where the context is longer."""

    def __init__(self, store: TokenStore, probe: ProbeTask, context: int, seed: int):
        if context < probe.length:
            raise UserError(
                f"model.context={context} is shorter than the examples, which have {probe.length} symbols; set "
                f"model.context={probe.length}."
            )
        self.store, self.probe, self.context = store, probe, context
        self.order = EpochOrder(len(store) // probe.length, seed)

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Answers asked for in each sequence."""
        return np.full(len(numbers), self.probe.counted)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        """(tokens, targets, None) of the given sequence numbers."""
        return *self.examples(self.order(numbers)[1]), None

    def examples(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of the examples at the given places of the split, padded to the context."""
        symbols = self.store.windows(places * self.probe.length, self.probe.length)
        answers, asked = self.probe.answers(symbols)
        room = ((0, 0), (0, self.context - self.probe.length))
        targets = np.where(asked, answers, IGNORED)
        return np.pad(symbols, room, constant_values=PADDING), np.pad(targets, room, constant_values=IGNORED)
