"""One pass through a model can be read in one sitting: through how many files it goes, and how often to another one.

The fast path is counted, because it is the one that runs; what is built once (kernels, tables) is not.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch

import polarlm
from polarlm.attention import PolarAttention, StandardAttention
from polarlm.fast.native_backend import unbuilt
from polarlm.model import GPT, GPTConfig

PACKAGE = str(Path(polarlm.__file__).parent)


def walk(work) -> tuple[set[str], int]:
    """The package's files that `work` calls into, and the calls and returns that cross from one to another."""
    files: list[str] = []

    def profile(frame, event, _):
        if event in ("call", "return") and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return set(files), sum(one != other for one, other in itertools.pairwise(files))


@pytest.mark.skipif(unbuilt(torch.float32) is not None, reason="plain torch takes other files")
@pytest.mark.parametrize(("mixer", "most_files", "most_hops"), [(PolarAttention, 14, 60), (StandardAttention, 10, 35)])
def test_the_loss_of_one_layer_is_read_in_few_files(mixer, most_files, most_hops):
    frame = "pre+tangent" if mixer is PolarAttention else "pre"
    model = GPT(GPTConfig(vocab_size=64, context=32, d_model=64, n_layer=1, n_head=2, frame=frame), mixer)
    tokens = torch.randint(64, (2, 32))
    model.loss(tokens, tokens)
    files, hops = walk(lambda: model.loss(tokens, tokens))
    assert len(files) <= most_files and hops <= most_hops, (hops, sorted(files))
