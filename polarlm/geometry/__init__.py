"""The paper's mathematics with no network in it."""

from polarlm.geometry.multihead import project
from polarlm.geometry.transport import rotary_tables, rotate

__all__ = ["project", "rotary_tables", "rotate"]
