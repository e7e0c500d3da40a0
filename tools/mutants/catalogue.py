"""The list of small bugs, by what they break."""

from tools.mutants.attention import MUTANTS as ATTENTION
from tools.mutants.data import MUTANTS as DATA
from tools.mutants.geometry import MUTANTS as GEOMETRY
from tools.mutants.model import MUTANTS as MODEL
from tools.mutants.training import MUTANTS as TRAINING
from tools.mutants.verdict import MUTANTS as VERDICT

ALL = [*GEOMETRY, *ATTENTION, *MODEL, *TRAINING, *DATA, *VERDICT]
