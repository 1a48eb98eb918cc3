"""Peer: our engine, by its single-sequence driver. The parent puts the build's directory on PYTHONPATH."""

from peer import serve


def load(checkpoint, dtype):
    from importlib.metadata import version

    import engine
    from engine import blas
    from engine.direct import DirectEngine

    model = DirectEngine.load(checkpoint, dtype=dtype)
    model.eos_token_ids = frozenset()  # a peer's loop does not stop there either

    import mlx.core as mx  # not before the engine, which binds a BLAS ahead of it

    def generate(prompt, count):
        return (token.id for token in model.generate(prompt, count))

    environment = {"mlx": version("mlx"), "device": str(mx.default_device()), "blas": blas.describe()}
    return environment | {"engine": engine.__file__}, generate


if __name__ == "__main__":
    serve(load)
