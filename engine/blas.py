"""A fast BLAS for MLX on Linux CPUs.

MLX's CPU wheel links the reference BLAS, which multiplies float32 matrices at about 6 GFLOP/s on two cores. The dynamic
linker resolves its BLAS symbols in the global scope first, so a library that exports `cblas_sgemm`, or the Fortran `sgemm_`
that the reference `cblas_sgemm` calls, takes its place if it is loaded with RTLD_GLOBAL before `mlx.core` is imported:
130 to 180 GFLOP/s measured, and matrix-vector products at memory speed. torch's CPU library exports MKL (x86) or brings
OpenBLAS (ARM); it is found on disk and loaded as a plain library, torch itself is not imported. Loading it costs 0.3 s
and 100 MB.

DECODEGATE_BLAS selects: `auto` (default), `off`, or the path of a library. Number of threads: OMP_NUM_THREADS. The library's
OpenMP threads are told to sleep between calls instead of spinning (OMP_WAIT_POLICY, unless it is set): on a machine that does
anything else at the same time, spinning doubles the CPU time of decoding and of prefill. MKL is told to give the same bits
wherever its operands lie in memory (MKL_CBWR, unless it is set): without it a product of 1 x 119 by 119 x 64 on two threads
rounds in 4 ways over 64 alignments, so that a repeated run differs; AUTO keeps the fastest code path, at no measurable cost.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ENVIRONMENT", "bind", "describe", "variables"]

ENVIRONMENT = "DECODEGATE_BLAS"
_SYMBOLS = ("cblas_sgemm", "sgemm_")  # either one serves MLX's matmul
_THREADS = {"mkl": "MKL_Get_Max_Threads", "openblas": "openblas_get_num_threads"}
_SONAMES = ("libmkl_rt.so.2", "libopenblas.so.0", "libopenblas.so")

_chosen: str | None = None
_variables: dict[str, str] = {}


def bind() -> str:
    """Load a fast BLAS ahead of MLX, once per process; later calls do nothing. Returns `describe()`."""
    global _chosen
    if _chosen is None:
        _chosen = _bind(os.environ.get(ENVIRONMENT, "auto").strip() or "auto")
    return _chosen


def describe() -> str:
    """What the process uses, for people and records: "mkl via libtorch_cpu.so, 2 threads", "off (...)", "none found (...)"."""
    return _chosen or "not bound yet"


def variables() -> dict[str, str]:
    """What `bind` has added to this process' environment; a child process that is another engine's should not inherit it."""
    return dict(_variables)


def _bind(setting: str) -> str:
    if sys.platform != "linux":
        return f"off (MLX brings its own on {sys.platform})"
    if setting == "off":
        return f"off ({ENVIRONMENT}=off)"
    if "mlx.core" in sys.modules:
        return "off (mlx.core was imported before engine, too late to bind a BLAS)"
    candidates = _candidates() if setting == "auto" else [setting]
    reasons = []
    for candidate in candidates:
        try:
            with _sleeping_threads():
                return _load(candidate)
        except OSError as error:
            reasons.append(f"{Path(candidate).name}: {' '.join(str(error).split())}")
    text = f"none found ({'; '.join(reasons)}); float32 matmul will be slow"
    if setting != "auto":  # an explicit wish is not passed over in silence
        warnings.warn(f"{ENVIRONMENT}={setting}: {text}", RuntimeWarning, stacklevel=4)
    return text


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """OpenMP reads its settings when its library is loaded; the environment is left as it was, for child processes."""
    if "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def _candidates() -> list[str]:
    """Paths and sonames in order of preference: what torch ships, MKL and OpenBLAS of the environment, then of the system."""
    paths = []
    spec = importlib.util.find_spec("torch")  # of a top-level package: does not import it
    if spec is not None and spec.origin is not None:
        paths.append(Path(spec.origin).parent / "lib" / "libtorch_cpu.so")
    paths += [Path(sys.prefix) / "lib" / name for name in _SONAMES]
    return [str(path) for path in paths if path.is_file()] + list(_SONAMES)


def _load(library: str) -> str:
    """Load one library into the global scope and return its description. OSError where MLX could not use it."""
    local = ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL)
    exported = [symbol for symbol in _SYMBOLS if hasattr(local, symbol)]
    if not exported:
        raise OSError(f"exports neither {' nor '.join(_SYMBOLS)}")
    name = _name(local)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # promotes the handle: no second load
    in_scope = ctypes.CDLL(None)
    bound = [symbol for symbol in exported if _address(in_scope, symbol) == _address(local, symbol)]
    if not bound:
        raise OSError("another BLAS was in the global scope before it")
    if name == "mkl" and "MKL_CBWR" not in os.environ:  # read at MKL's first product; left there, so that records name it
        _variables["MKL_CBWR"] = os.environ["MKL_CBWR"] = "AUTO"
    return f"{name} via {Path(library).name}{_threads(local, name)}"


def _name(library: ctypes.CDLL) -> str:
    if hasattr(library, "MKL_Get_Version_String") or hasattr(library, "mkl_get_version_string"):
        return "mkl"
    if hasattr(library, "openblas_get_config"):
        library.openblas_get_config.restype = ctypes.c_char_p
        config = library.openblas_get_config().decode(errors="replace")
        if "USE64BITINT" in config:
            raise OSError("has 64-bit integers, MLX passes 32-bit ones")
        return "openblas"
    return "blas"


def _threads(library: ctypes.CDLL, name: str) -> str:
    """How many threads it takes for one product; empty where it does not say. Speeds mean little without it."""
    symbol = _THREADS.get(name)
    if symbol is None or not hasattr(library, symbol):
        return ""
    count = getattr(library, symbol)()
    return f", {count} thread{'s' * (count != 1)}"


def _address(library: ctypes.CDLL, symbol: str) -> int | None:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value if hasattr(library, symbol) else None
