"""The numerics fingerprint: what decides the bits of a model's logits, hashed.

Servers of equal fingerprint promise equal bits. Knows devices and library versions; refuses to know where weights live:
their digest is given.
"""

import hashlib
import json
import platform

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from specdec.messages import Numerics
from specdec.model.activations import ACTIVATION_KERNELS
from specdec.model.linear import LinearKernel
from specdec.model.norms import NORM_KERNEL
from specdec.model.paged_attention import attention_kernel_name

_CONFIG_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "dtype", "quantization_config")


def numerics_of(
    config: PreTrainedConfig, weights_digest: str, *, kernel: LinearKernel, device: torch.device
) -> Numerics:
    """`weights_digest` names the stored weights; `config` is hashed too, since rotary bases and epsilons count."""
    facts = {
        "weights_digest": weights_digest,
        "weights_dtype": kernel.weights_dtype,
        "compute_dtype": str(kernel.compute_dtype).removeprefix("torch."),
        "device": _device_name(device),
        "linear_kernel": kernel.name,
        "attention_kernel": attention_kernel_name(device),
        "libraries": _libraries(device),
    }
    described = {key: value for key, value in config.to_dict().items() if key not in _CONFIG_NOT_OF_THE_MODEL}
    text = json.dumps({**facts, "row_kernels": _row_kernels(device), "config": described}, sort_keys=True, default=str)
    return Numerics(fingerprint=hashlib.sha256(text.encode()).hexdigest(), **facts)


def digest_of_parameters(model: nn.Module) -> str:
    """SHA-256 over the weights in memory: for models that come from no file. About a second per gigabyte."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _row_kernels(device: torch.device) -> list[str]:
    """Our own kernels beside those of linears and attention. What compiled them stands in the attention's name."""
    if device.type == "cpu":
        return [NORM_KERNEL, ACTIVATION_KERNELS]
    from specdec.model.cuda.rms_norm import CUDA_NORM_KERNEL

    return [CUDA_NORM_KERNEL]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda {torch.cuda.get_device_name(device)} sm{major}{minor}"
    if device.type != "cpu":
        return str(device)
    extensions = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported,
        "vnni": torch.cpu._is_vnni_supported,
        "amx": torch.cpu._is_amx_tile_supported,
    }
    names = [torch.backends.cpu.get_cpu_capability(), *(name for name, has in extensions.items() if has())]
    return f"cpu {platform.machine()} {' '.join(names)}"


def _libraries(device: torch.device) -> str:
    names = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if device.type == "cuda":
        names += [f"cuda {torch.version.cuda}", f"cudnn {torch.backends.cudnn.version()}"]  # type: ignore[no-untyped-call]
    return ", ".join(names)
