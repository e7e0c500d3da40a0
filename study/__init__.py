"""The study: questions written down before they are run, runs reduced to small rows, a page made from the rows."""
