# SPDX-License-Identifier: Apache-2.0
"""Parameters: when ZeRO gathers and frees Muon's matrices, and where it takes them from.

lifetime.py and owner_source.py are for ZeRO-3, hidden_gather.py is for ZeRO-1/2.
"""
