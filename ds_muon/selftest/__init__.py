# SPDX-License-Identifier: Apache-2.0
"""`ds_muon selftest`: is training exact on these devices, with these versions?

model.py and reference.py are what is trained and what must come out, training.py runs DeepSpeed,
parts.py has the comparisons, session.py runs them on all ranks and gives the verdict. command.py
launches ranks; `deepspeed --module ds_muon.selftest` and `torchrun -m ds_muon.selftest` are ranks.
"""
