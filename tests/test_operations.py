"""The door to polarlm/fast: behind it closed, and without the package, everything is computed by plain functions."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polarlm import operations
from polarlm.attention import PolarAttention, StandardAttention
from polarlm.attention.robust import robust_attention
from polarlm.errors import UserError
from polarlm.geometry import rotate
from polarlm.model import GPT, GPTConfig
from polarlm.operations import closed, plain
from tests.fast.cases import make_case

ROOT = Path(__file__).resolve().parents[1]
# Contract, oracle and limits of the blocks, frames, export: what must hold whoever computes.
OTHERS = "" if "POLARLM_NIGHTLY" in os.environ else " and not polar_"  # polar's variants: at night
CORRECTNESS = [
    "tests/geometry/test_bridge_to_attention.py",
    "tests/attention/test_limits.py",
    "tests/attention/test_oracle_baselines.py",
    "tests/model/test_frames.py",
    "tests/contract/test_block_contract.py",
    # Of the contract what the package has a part in; compiled and captured graphs never see it.
    *("-k", "not block_contract or ((decoding or packed_documents or float64 or recorded_weights)" + OTHERS + ")"),
]


def model(mixer=PolarAttention, **settings) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=31, context=20, d_model=64, n_layer=2, n_head=4, **settings.pop("config", {}))
    return GPT(config, functools.partial(mixer, **settings))


def loss_and_gradients(net: GPT) -> list[torch.Tensor]:
    tokens = torch.arange(40).view(2, 20) % 31
    net.zero_grad()
    loss = net.loss(tokens, tokens.roll(-1, 1))
    loss.backward()
    return [loss, *(p.grad for p in net.parameters() if p.grad is not None)]


def decoded(net: GPT) -> torch.Tensor:
    tokens, cache = torch.arange(12)[None], net.new_cache(1, 12)
    with torch.no_grad():
        return torch.cat([net(tokens[:, i : i + 1], cache=cache) for i in range(12)], dim=1)


@pytest.mark.parametrize("mixer", [PolarAttention, StandardAttention])
def test_a_closed_door_gives_the_same_numbers(mixer):
    net = model(mixer)
    fast, token_by_token = loss_and_gradients(net), decoded(net)
    with closed():
        torch.testing.assert_close(loss_and_gradients(net), fast, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(decoded(net), token_by_token, rtol=1e-3, atol=1e-4)


@pytest.fixture
def broken(monkeypatch):
    """Every faster version fails when it is called."""

    def fail(*_arguments, **_options):
        raise AssertionError("this came through the door")

    open_versions = dict(operations._faster)
    assert len(open_versions) >= 9
    for operation in open_versions:
        monkeypatch.setitem(operations._faster, operation, fail)
        operations._point(operation, fail)
    yield
    for operation, function in open_versions.items():
        operations._point(operation, function, plain(operation))


@pytest.mark.parametrize("settings", [{}, {"config": {"checkpointing": True}}], ids=str)
def test_the_reference_backend_takes_nothing_through_the_door(settings, broken):
    with closed():
        net = model(backend="reference", **settings).train()
    loss_and_gradients(net)
    decoded(net.eval())
    net.blocks[0].mixer.backend = net.blocks[1].mixer.backend = "auto"
    with pytest.raises(AssertionError, match="through the door"):
        loss_and_gradients(net)


def test_the_door_opens_again_after_an_error_and_only_where_it_was_closed():
    inside = rotate.func
    assert inside is not plain(rotate)
    with pytest.raises(ZeroDivisionError), closed():
        1 / (rotate.func is not plain(rotate))
    with closed():
        with closed():
            pass
        assert rotate.func is plain(rotate)
    assert rotate.func is inside


def test_a_backend_behind_the_closed_door_is_refused_by_name():
    with closed(), pytest.raises(UserError, match="is 'native'; without polarlm/fast it must be one of"):
        robust_attention(make_case().call(kernel="student"), backend="native")


def test_the_variable_keeps_the_door_closed():
    code = (
        "import sys, polarlm.attention as a; from polarlm.geometry import rotate\n"
        "from polarlm.operations import plain\n"
        "a.StandardAttention(a.MixerShape(32, 2, 2, 16, 0, 1))\n"
        "print(rotate.func is plain(rotate), 'polarlm.fast' in sys.modules)"
    )
    for switch, said in (("0", "True False"), ("1", "False True")):
        environment = {**os.environ, "POLARLM_FAST": switch}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.stdout.strip() == said, done.stdout + done.stderr


@pytest.mark.slow
def test_without_the_package_every_test_of_correctness_is_green():
    hidden = "import sys, pytest; sys.modules['polarlm.fast'] = None"
    code = f"{hidden}; sys.exit(pytest.main({[*CORRECTNESS, '-q', '-x']}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
