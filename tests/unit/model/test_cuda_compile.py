"""Every kernel compiles to machine code of real GPUs: Triton's compiler needs none."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.model.cuda import attention_kernels as kernels
from specdec.model.cuda.rms_norm import _rms_norm

def compile_for(capability, kernel, pointers, **constants):
    kinds = {name: "constexpr" for name in constants} | {name: "*" + dtype for name, dtype in pointers.items()}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})

capability, dtype, softcap, window = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
floats = dict(partial_outputs="fp32", partial_maxima="fp32", partial_sums="fp32")
integers = dict.fromkeys(("num_keys", "num_direct_keys", "indices", "table_starts", "ancestor_starts"), "i32")
sizes, splits = dict(D=128, PADDED_D=128), dict(S=32, SPLIT=1024, WINDOW=window)
attend = compile_for(
    capability, kernels.attend_splits, integers | floats | dict.fromkeys(("query", "keys", "values"), dtype),
    SCALE=0.088, SOFTCAP=softcap, H=2, G=6, PADDED_G=16, TILE=64, BLOCK=16, **sizes, **splits,
)
if dtype != "fp32" and "mma" not in attend.asm["ptx"]:
    sys.exit("attention does not use the tensor cores")
if attend.metadata.shared > 99 * 1024:
    sys.exit(f"attention takes {attend.metadata.shared} bytes of shared memory: too much for small devices")
compile_for(
    capability, kernels.combine_splits, floats | dict(num_keys="i32", sinks="fp32", output=dtype),
    HAS_SINKS=sys.argv[5] == "sinks", NUM_HEADS=12, **sizes, **splits,
)
compile_for(
    capability, kernels.write_rows, dict(write_slots="i32") | dict.fromkeys(("key", "value", "keys", "values"), dtype),
    H=2, BLOCK=16, **sizes,
)
compile_for(capability, _rms_norm, dict(x=dtype, weight="fp32", output=dtype), EPSILON=1e-6, F=1536, PADDED_F=2048)
"""


@pytest.mark.parametrize(
    "options",
    [("80", "bf16", "30", "4096", "none"), ("90", "fp16", "0", "0", "sinks"), ("90", "fp32", "0", "0", "none")],
)
def test_kernels_compile_for_gpus(options: tuple[str, ...]) -> None:
    """In a process of its own, since this one may interpret kernels."""
    environment = {"TRITON_INTERPRET": "0", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
