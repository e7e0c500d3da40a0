"""Imported by the server that tests fork from (tests/forks.py): what a run imports and reads while it works."""

# ruff: noqa: F401

import matplotlib.backends.backend_agg
import matplotlib.figure
import tokenizers

import polarlm.data.tokenizer
import polarlm.diagnostics
import polarlm.evaluation.breakdowns
import polarlm.jobs.engine
import polarlm.jobs.places
import polarlm.launch.entry
import polarlm.launch.evaluate
import polarlm.launch.match
import polarlm.launch.train
import polarlm.report.pictures
import polarlm.training.loggers.progress
import polarlm.training.optimisers
import polarlm.training.schedules
import polarlm.verdict.budget
from polarlm.launch.overrides import compose, config_loader

compose(config_loader(), "train", [])
