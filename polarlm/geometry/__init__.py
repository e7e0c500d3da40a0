"""The paper's mathematics with no network in it: torch only, any float dtype, readable next to the paper.

polar (x = m v), sphere (projectors, Exp, Log), transport (rotation, RoPE), covariance, precision (kappa, rho),
robust (influence), likelihood, multihead (Prop. 5), simulation and the two filters; of Appendix G content_transport,
directional_objective and uncertainty. docs/theory.md maps every equation to its function and test.
"""

from polarlm.geometry.isotropic_filter import IsotropicFilter
from polarlm.geometry.multihead import project
from polarlm.geometry.polar import from_polar, polar_update, to_polar
from polarlm.geometry.rt_filter import RTFilter
from polarlm.geometry.simulation import RTModel, Trajectory, simulate
from polarlm.geometry.sphere import angle_between, exp_map, mean_direction, normalise, retract, tangential_part
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
