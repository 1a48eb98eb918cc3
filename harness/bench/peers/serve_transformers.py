"""Peer: transformers, forward by forward with its own cache: less overhead a token than `generate`."""

from peer import serve


def load(checkpoint, dtype):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), local_files_only=True
    ).eval()

    @torch.inference_mode()
    def generate(prompt, count):
        output = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        for index in range(count):
            token = output.logits[0, -1].argmax()
            yield token.item()
            if index + 1 < count:
                output = model(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "threads": torch.get_num_threads()}, generate


if __name__ == "__main__":
    serve(load)
