"""The paper's mathematics with no network in it: torch only, any float dtype, readable next to the paper.

polar (x = m v), sphere (projectors, Exp, Log), transport (rotation, RoPE), covariance, precision (kappa, rho),
robust (influence), likelihood, multihead (Prop. 5), simulation and the two filters; of Appendix G content_transport,
directional_objective and uncertainty. docs/theory.md maps every equation to its function and test.
"""

from polarlm.geometry.isotropic_filter import IsotropicEstimate, IsotropicFilter
from polarlm.geometry.multihead import project
from polarlm.geometry.polar import from_polar, polar_differential, polar_update, to_polar
from polarlm.geometry.rt_filter import RTEstimate, RTFilter
from polarlm.geometry.simulation import RTModel, Trajectory, simulate
from polarlm.geometry.sphere import (
    angle_between,
    exp_map,
    geodesic_step,
    log_map,
    mean_direction,
    mean_resultant_length,
    normalise,
    radial_part,
    retract,
    slerp,
    tangential_part,
)
from polarlm.geometry.transport import (
    phase_tables,
    rotary_frequencies,
    rotary_tables,
    rotate,
    rotate_aggregate_counter_rotate,
    transport,
)

__all__ = [
    "IsotropicEstimate",
    "IsotropicFilter",
    "RTEstimate",
    "RTFilter",
    "RTModel",
    "Trajectory",
    "angle_between",
    "exp_map",
    "from_polar",
    "geodesic_step",
    "log_map",
    "mean_direction",
    "mean_resultant_length",
    "normalise",
    "phase_tables",
    "polar_differential",
    "polar_update",
    "project",
    "radial_part",
    "retract",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
    "rotate_aggregate_counter_rotate",
    "simulate",
    "slerp",
    "tangential_part",
    "to_polar",
    "transport",
]
