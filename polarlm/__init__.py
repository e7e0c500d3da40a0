"""polarlm: does a better transformer block make a better language model?"""

__version__ = "0.1.0"
