"""Where text comes from: files, hub datasets, the embedded documentation; documents, and the split each belongs to."""
