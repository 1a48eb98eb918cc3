"""Independent torch references, one self-contained file per family: full recompute in float64, no caches, no chunks."""
