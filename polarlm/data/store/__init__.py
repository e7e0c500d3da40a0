"""Tokens on disk: written in sections that are complete or absent, checked, and read back as one long array."""
