"""The smallest honest adapter, to start yours from: an "engine" that runs the whole model again for every call.

    PYTHONPATH=docs decodegate gate --target example_target:Target --case llama/gqa

Replace what `Loaded` and `Session` do with calls of your engine. Importing the adapter must not import the engine: load it in
`load`. The checkpoint is a directory as a hub has it: config.json and safetensors, in some cases quantised.
"""

import numpy as np

from harness.target import Capabilities, GreedyResult


class Target:
    name = "example"
    capabilities = Capabilities(
        families=frozenset({"llama"}),  # those that it can load; None: any
        dtypes=frozenset({"float32"}),
        chunk="it has no chunked prefill",  # what it cannot do, with the reason: such cells end as `unsupported`
        batch="it decodes one sequence at a time",
    )

    def require(self):
        """Raise harness.outcomes.Infra with the install command where the engine is not installed."""

    def environment(self):
        return {"example": "1.0"}  # versions and device, for the header of the records

    def load(self, checkpoint, *, dtype, layout):
        return Loaded(checkpoint)


class Loaded:
    def __init__(self, checkpoint):
        from reference_models import loading

        self.config, self.weights = loading.load(checkpoint)

    def start(self):
        return Session(self)


class Session:
    def __init__(self, loaded):
        self.loaded = loaded
        self.tokens = {}  # sequence -> what it holds: a real engine has a cache here
        self.steps = 0

    def open(self, sequence):
        self.tokens[sequence] = []

    def close(self, sequence):
        del self.tokens[sequence]

    def rewind(self, sequence, count):
        del self.tokens[sequence][-count:]

    def feed(self, sequence, tokens, *, all_rows, chunk):
        self.tokens[sequence] += tokens
        return self._rows(sequence)[-len(tokens) if all_rows else -1 :]

    def step(self, tokens):
        (sequence, token), *_ = tokens.items()
        self.steps += 1
        return self.feed(sequence, [token], all_rows=False, chunk=None)

    def greedy(self, sequence, count):
        rows = [self._rows(sequence)[-1:]]
        for _ in range(count):
            rows.append(self.step({sequence: int(rows[-1].argmax())}))
        return GreedyResult(self.tokens[sequence][-count:], np.concatenate(rows[1:]))

    def counters(self):
        return {"decode_steps": self.steps}  # a check whose feature was not counted is vacuous

    def _rows(self, sequence):
        import torch

        from reference_models import llama

        tokens = self.tokens[sequence]
        result = llama.recompute(self.loaded.config, self.loaded.weights, tokens, dtype=torch.float32)
        return result.logits.numpy()
