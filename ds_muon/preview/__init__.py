# SPDX-License-Identifier: Apache-2.0
"""`ds_muon plan` and `ds_muon check`: what a run would do, before it runs.

record.py and sweep.py have the numbers, show.py prints them; the commands have the arguments, and
ask diagnose/acceptance.py whether a run would start. Never imports DeepSpeed itself, and nothing
that trains imports it.
"""
