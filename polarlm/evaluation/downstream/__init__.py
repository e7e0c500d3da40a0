"""Does it carry over to anything but loss? Minimal pairs, last words, and any task of lm-evaluation-harness."""
