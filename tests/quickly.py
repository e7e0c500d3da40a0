"""Imported first: the processes of tests start as our programs do."""

from polarlm.quick_start import skip_unused_libraries

skip_unused_libraries()
