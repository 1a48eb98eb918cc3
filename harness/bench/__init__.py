"""Benchmarks: our engine against its peers on the same weights, in one run, in interleaved rounds, under the device lock."""
