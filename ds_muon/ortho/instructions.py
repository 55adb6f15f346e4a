# SPDX-License-Identifier: Apache-2.0
"""Instructions: which dtypes a device multiplies at full speed."""

from __future__ import annotations

import torch


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `device` has instructions for products of `dtype`; only CPUs can lack them.

    Without them a CPU multiplies bf16 and fp16 matrices 10 to 100 times slower than fp32 ones.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
