"""Text to ids and back: bytes, characters, words, and any sub-word vocabulary."""
