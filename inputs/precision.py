"""What a device can multiply. Trainer and server ask the same."""

import torch


def slow_in_bfloat16(device: torch.device) -> bool:
    """Whether torch has no kernels for products in bfloat16 here: CPUs without AVX512, where it takes a plain loop."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
