"""One module per command; each has `register(app: typer.Typer) -> None`."""
