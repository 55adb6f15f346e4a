# SPDX-License-Identifier: Apache-2.0
"""`ds_muon doctor`: what is wrong, slow or large, before a run.

machine.py reads the facts, environment.py and configuration.py judge them, findings.py is what
they say, show.py prints it, command.py has the arguments. Nothing that trains imports it.
"""
