"""Looking inside any block: radial growth, precision, attention and parameters, under the same names for all."""

from polarlm.diagnostics.probe import Histogram, Probe, run_probe

__all__ = ["Histogram", "Probe", "run_probe"]
