# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as a rank runs it, in every regime, and those who observe it.

step.py runs what schedule.py derived from a plan, in arena.py's memory; watch.py tells metrics.py
and verify.py where a step begins and ends. Moves bytes through comm/, does its math in ortho/.
"""
