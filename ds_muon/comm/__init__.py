# SPDX-License-Identifier: Apache-2.0
"""Communication: transport, the exchange of pieces, and the agreement of ranks at start.

Never does: math, or import DeepSpeed; collectives are passed in as a Transport.
Read next: exchange.py.
"""
