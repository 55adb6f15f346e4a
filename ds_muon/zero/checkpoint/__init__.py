# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of DeepSpeed: found, checked and opened; the engine's save and load hooked.

A load into the run that saved goes through DeepSpeed's own code. Every other one, whatever the
world size, ZeRO stage, replicas or optimizer that saved, fills this run's leaves by parameter name.
"""
