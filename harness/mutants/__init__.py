"""Mutants: one planted fault each, on which a named check must fail; the proof that the checks can fail."""
