# SPDX-License-Identifier: Apache-2.0
"""Attention: what QK-clip has to know of a model: its heads (find.py), their logits (probe.py).

Never does: import transformers or DeepSpeed, or communicate.
"""
