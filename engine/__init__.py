"""The engine under test: a full MLX engine for language models. It never imports torch, the harness or a reference."""
