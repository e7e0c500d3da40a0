"""Calibrates W_o, so that every fresh attention branch adds a step of the same RMS (see `initialisation`).

Attention weights differ between blocks, and so does the RMS of an average of independent values (by 20 % between the
shipped blocks, far more between their settings). The scale of W_o is therefore measured: the fresh mixer reads a random
stream of fixed length once, and W_o is scaled to give the RMS of the convention.
"""

from __future__ import annotations

import torch

from polarlm.attention.initialisation import ATTENTION_RMS, PROBE_LENGTH
from polarlm.attention.mixer import Mixer, TokenContext
from polarlm.geometry import rotary_tables

PROBE_CHANNELS = 4096  # over all rows: narrow models need more rows for a mean that other streams agree with


@torch.no_grad()
def calibrate(mixer: Mixer) -> None:
    """Scale `mixer.out` so that a random stream comes out with RMS ATTENTION_RMS / sqrt(2L); gpt2 has no such rule.

    It is measured with a step size of 1: another alpha makes a fresh block's step larger or smaller, as it says.
    """
    if mixer.shape.init != "width" or not mixer.calibrated or mixer.out.weight.is_meta:
        return
    with mixer.unit_step():
        measured = probe_rms(mixer)
    if 0 < measured < float("inf"):  # maps that start at zero stay there
        mixer.out.weight.mul_(ATTENTION_RMS / (2 * mixer.shape.n_layer) ** 0.5 / measured)


def probe_rms(mixer: Mixer) -> float:
    """RMS of a mixer's output for a random stream with the RMS that the mixer will read."""
    weight, training, width = mixer.out.weight, mixer.training, mixer.shape.d_model
    rows = max(2, PROBE_CHANNELS // width)
    positions = torch.arange(PROBE_LENGTH)
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers are left alone
    stream = mixer.input_rms * torch.randn(rows, PROBE_LENGTH, width, generator=generator)
    rotary = rotary_tables(positions, mixer.rotary_dim, mixer.shape.rope_base)
    context = TokenContext(
        (rotary[0].to(weight), rotary[1].to(weight)),
        record={},  # which also means the reference path: nothing is compiled to make a model
        positions=positions.to(weight.device),
    )
    out = mixer.eval()(stream.to(weight), context)
    mixer.train(training)
    return out.double().square().mean().sqrt().item()
