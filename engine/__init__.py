"""The engine under test: a full MLX engine for language models. It never imports torch, the harness or a reference.

Importing the package binds a fast BLAS (engine/blas.py), so that every module below that imports MLX finds it bound.
"""

from engine import blas

blas.bind()
