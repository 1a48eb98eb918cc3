"""Peer: mlx-lm as installed, by its own `generate_step` (one step in flight, greedy)."""

from peer import serve


def load(checkpoint, dtype):
    from importlib.metadata import version
    from pathlib import Path

    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(checkpoint))
    held = str(model.model.embed_tokens.weight.dtype).removeprefix("mlx.core.")
    if held != dtype:
        raise SystemExit(f"mlx-lm holds the weights in {held}, not {dtype}")

    def generate(prompt, count):
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
            yield token if isinstance(token, int) else token.item()

    return {"mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "device": str(mx.default_device())}, generate


if __name__ == "__main__":
    serve(load)
