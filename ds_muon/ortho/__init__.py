# SPDX-License-Identifier: Apache-2.0
"""Math of the matrix half: coefficients, recipes, Newton-Schulz, momentum, scale.

Never does: communicate, or know of ranks, ZeRO or DeepSpeed.
Read next: newton_schulz.py.
"""
