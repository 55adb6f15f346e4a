# SPDX-License-Identifier: Apache-2.0
"""Routing: which parameter is a matrix for Muon, or several, which is AdamW's, and why.

table.py has the order of the rules and the result, sites.py what is known of a parameter, rules.py
what is no hidden matrix, fused.py the parameters that hold several, matrices.py how they are cut.
Never imports DeepSpeed (zero.Init's `ds_shape` is read where a parameter carries it).
"""

from ds_muon.routing.rules import HEAD_NAMES
from ds_muon.routing.sites import clean_name, layer_shape
from ds_muon.routing.table import Route, RoutingTable, route_parameters

__all__ = [
    "HEAD_NAMES",
    "Route",
    "RoutingTable",
    "clean_name",
    "layer_shape",
    "route_parameters",
]
