"""What `eventbus-engine demo` runs: a small CNN trained on handwritten digits, ordered, watched and traced."""
