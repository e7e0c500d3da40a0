"""Looking inside any block: radial growth, precision, attention and parameters, under the same names for all."""

from polarlm.diagnostics.probe import Histogram, Probe, eval_mode, run_probe

__all__ = ["Histogram", "Probe", "eval_mode", "run_probe"]
