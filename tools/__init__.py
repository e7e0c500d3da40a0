"""Programs for those who develop polarlm; nothing here is shipped."""
