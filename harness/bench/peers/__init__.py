"""Peer processes. Each `serve_*.py` is run as a script, maybe by another environment's Python, and imports only its own engine."""
