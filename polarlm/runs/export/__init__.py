"""A run as a folder for other programs."""
