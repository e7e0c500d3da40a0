"""Imported first: the processes of tests start as our programs do."""

from polarlm.startup import skip_unused_libraries

skip_unused_libraries()
