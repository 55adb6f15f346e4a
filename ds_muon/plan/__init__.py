# SPDX-License-Identifier: Apache-2.0
"""Plans: which rank owns which matrix, in which bucket, and which range travels where.

Everything here is integers in frozen records, computed alike on every rank from the same layout.
Never does: communicate, hold a tensor, or import DeepSpeed.
Read next: layout.py, owners.py, buckets.py, routes.py, in this order.
"""
