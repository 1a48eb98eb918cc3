"""Peer processes. Each `serve_*.py` runs as a script, maybe under another Python, and imports only its own engine."""
