"""engine/blas.py, each case in a process of its own, because a BLAS is bound once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MLX brings its own BLAS elsewhere")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch lends the BLAS")


def run(code: str, setting: str | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("DECODEGATE_BLAS", "OMP_WAIT_POLICY")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if setting is not None:
        environment["DECODEGATE_BLAS"] = setting
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


DESCRIBE = "from engine import blas; print(blas.describe())"


@needs_torch
def test_importing_engine_binds_what_torch_ships_without_importing_torch():
    out = run(f"{DESCRIBE}; import sys; print('torch' in sys.modules, 'OMP_WAIT_POLICY' in __import__('os').environ)")
    assert "via libtorch_cpu.so" in out
    assert "False False" in out


@needs_torch
def test_matmul_is_right_before_and_after_torch_is_imported_in_the_same_process():
    out = run(
        "import engine, mlx.core as mx, numpy as np\n"
        "a, b = (np.random.default_rng(s).normal(size=(70, 70)).astype(np.float32) for s in (0, 1))\n"
        "good = lambda: np.allclose(np.array(mx.array(a) @ mx.array(b)), a @ b, atol=1e-4)\n"
        "print(good())\n"
        "import torch\n"
        "print(good(), np.allclose((torch.from_numpy(a) @ torch.from_numpy(b)).numpy(), a @ b, atol=1e-4))\n"
    )
    assert out.split() == ["True", "True", "True"]


@needs_torch
def test_description_says_how_many_threads_a_product_takes():
    assert run(DESCRIBE).strip().endswith(", 1 thread")


def test_off_leaves_mlx_with_its_own():
    out = run(
        "from engine import blas; print(blas.describe()); import ctypes; print(hasattr(ctypes.CDLL(None), 'sgemm_'))", "off"
    )
    assert "off (DECODEGATE_BLAS=off)" in out
    assert "False" in out


def test_too_late_is_said_where_mlx_was_imported_first():
    assert "mlx.core was imported before engine" in run(f"import mlx.core; {DESCRIBE}")


def test_a_library_that_does_not_exist_is_warned_of_and_the_engine_still_computes():
    out = run(f"{DESCRIBE}; import mlx.core as mx; print(mx.ones((2, 2)) @ mx.ones((2, 2)))", "/nonexistent/libnoblas.so")
    assert "RuntimeWarning" in out and "none found (libnoblas.so" in out
    assert "array([[2, 2]" in out


def test_a_library_without_a_blas_is_not_chosen():
    assert "exports neither cblas_sgemm nor sgemm_" in run(DESCRIBE, "libm.so.6")


def test_binding_twice_does_nothing():
    out = run(
        "import os; from engine import blas; a = blas.bind(); os.environ['DECODEGATE_BLAS'] = 'off'; print(a == blas.bind())"
    )
    assert "True" in out


@needs_torch
def test_a_product_on_two_threads_has_the_same_bits_wherever_its_operands_lie():
    out = run(
        "import os; os.environ['OMP_NUM_THREADS'] = '2'\n"
        "import ctypes, itertools, engine, numpy as np\n"
        "def place(values, at):\n"
        "    raw = np.zeros(values.nbytes + 128, np.uint8)\n"
        "    start = -raw.ctypes.data % 64 + at\n"
        "    view = raw[start : start + values.nbytes].view(np.float32)\n"
        "    view[:] = values\n"
        "    return view\n"
        "r, n = np.random.default_rng(0), 119\n"
        "v, w, out = r.normal(size=64 * n).astype('f'), r.normal(size=n).astype('f'), np.zeros(64, 'f')\n"
        "i, f = (lambda x: ctypes.byref(ctypes.c_int(x))), (lambda x: ctypes.byref(ctypes.c_float(x)))\n"
        "p = lambda a: ctypes.c_void_p(a.ctypes.data)\n"
        "seen = set()\n"
        "for a, b, c in itertools.product((8, 24, 40, 56), repeat=3):\n"
        "    V, W, C = place(v, a), place(w, b), place(out, c)\n"
        "    ctypes.CDLL(None).sgemm_(b'N', b'N', i(64), i(1), i(n), f(1), p(V), i(64), p(W), i(n), f(0), p(C), i(64))\n"
        "    seen.add(C.tobytes())\n"
        "print(len(seen), bool(np.abs(C).max() > 0))\n"
    )
    assert out.split() == ["1", "True"]
