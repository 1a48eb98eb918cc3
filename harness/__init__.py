"""Replay a schedule on a target and compare every row of logits it yields with the oracle's recompute of the same prefix."""
