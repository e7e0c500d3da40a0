"""The list of small bugs, by room."""

from tools.mutants.geometry import MUTANTS as GEOMETRY

ALL = [*GEOMETRY]
