"""The front door: the `decodegate` command, which ties the harness to the reports."""
