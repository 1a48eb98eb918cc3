"""Hypothesis looks for counterexamples, not at the clock: how fast this machine draws and runs examples is no verdict."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("decodegate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("decodegate")
