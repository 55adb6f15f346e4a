# SPDX-License-Identifier: Apache-2.0
"""HSDP: replicas of one ZeRO partitioning.

mesh.py has the groups and lets ZeRO partition over a row, step.py overrides ZeRO's step,
publication.py says what waits for other replicas' updates, state.py keeps checkpoints and accessors
whole, gathered.py keeps replicas equal, replication.py puts them together.
"""
