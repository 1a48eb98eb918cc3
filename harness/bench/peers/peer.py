"""What the peer scripts share: a line of JSON in, a line of JSON out. Standard library only, since any environment may run it.

    in   {"prompt": [ids], "decode": N}
    out  {"prefill_s": ..., "decode_s": ..., "tokens": [N ids]}

`prefill_s` runs from the call to the first chosen token, `decode_s` from there to the last one: N - 1 tokens.
"""

import json
import os
import sys
import time


def serve(load):
    """`load(checkpoint, dtype) -> (environment, generate)`; generate(prompt, count) yields each token id when it is chosen."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not end up among the replies
    environment, generate = load(sys.argv[1], sys.argv[2])
    print(json.dumps({"environment": environment}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens, times = [], [time.perf_counter()]
        for token in generate(request["prompt"], request["decode"]):
            tokens.append(int(token))
            times.append(time.perf_counter())
        reply = {"prefill_s": times[1] - times[0], "decode_s": times[-1] - times[1], "tokens": tokens}
        print(json.dumps(reply), file=replies, flush=True)
