"""The paper's mathematics with no network in it: torch only, any float dtype, readable next to the paper.

sphere (x = m v, projectors, Exp, Log), transport (rotation, RoPE), covariance, precision (kappa, rho; G.3), robust
(influence), likelihood (G.1), multihead (Prop. 5), simulation, rt_filter (both filters), content_transport (G.2).
docs/theory.md maps every equation to its function and test.
"""

from polarlm.geometry.multihead import project
from polarlm.geometry.rt_filter import IsotropicFilter, RTFilter
from polarlm.geometry.simulation import RTModel, Trajectory, simulate
from polarlm.geometry.sphere import (
    angle_between,
    exp_map,
    from_polar,
    mean_direction,
    normalise,
    polar_update,
    retract,
    tangential_part,
    to_polar,
)
from polarlm.geometry.transport import rotary_tables, rotate, transport

__all__ = [
    "IsotropicFilter",
    "RTFilter",
    "RTModel",
    "Trajectory",
    "angle_between",
    "exp_map",
    "from_polar",
    "mean_direction",
    "normalise",
    "polar_update",
    "project",
    "retract",
    "rotary_tables",
    "rotate",
    "simulate",
    "tangential_part",
    "to_polar",
    "transport",
]
