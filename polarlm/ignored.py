"""The target that no loss counts: what pads a row or follows the end of a document."""

IGNORED = -100  # torch's own ignore_index
