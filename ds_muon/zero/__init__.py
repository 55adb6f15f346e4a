# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: the only package that imports it or reads its private attributes.

registration.py hooks the engine, support.py refuses what is not exact, leaves.py reads where ZeRO
put each parameter, attach.py plans and binds, seams.py keeps every private attribute's name.
"""
