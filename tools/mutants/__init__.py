"""Mutation testing: a fixed list of small bugs, each of which some test has to notice (`make mutants`)."""
