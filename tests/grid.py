# SPDX-License-Identifier: Apache-2.0
"""Cells of grids that repeat others: what they compare is compared in cells that stay.

They run with DS_MUON_FULL_GRID=1; without it the suite fits into a quarter of an hour on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

FULL_GRID = bool(os.environ.get("DS_MUON_FULL_GRID"))

Cell = Mapping[str, Any]

REPEATS: dict[str, Callable[[Cell], bool]] = {
    # test_exactness: each stage, dtype, world and number of threads stays
    "test_plans_do_not_change_a_bit": lambda c: (
        (c["world"], c["stage"], c["dtype"])
        not in {(2, 1, "fp32"), (2, 2, "bf16"), (2, 3, "fp32"), (4, 2, "fp32"), (4, 3, "bf16")}
        or (c["threads"] == 2 and (c["world"] == 4 or c["stage"] == 1))
    ),
    "test_owners_and_kept_memory_do_not_change_a_bit": lambda c: (
        (c["ns_dtype"] == "bf16") is not (c["stage"] == 2)
    ),
    "test_live_bytes_of_the_step_are_the_plans_and_within_the_cap": lambda c: (
        not c["params"].get("offload")
        and (c["params"]["max_inflight_buckets"] == 1) is (c["params"]["ns_dtype"] == "bf16")
    ),
    # test_hsdp: worlds of six ranks (whose start alone takes 15 s), and stage 1 beside stage 2
    "test_parity_with_one_process": lambda c: c.get("world") == 6,
    "test_replicas_stay_equal_after_every_step": lambda c: c["world"] == 6,
    "test_elements_per_axis_are_the_formulas": lambda c: c["world"] == 6,
    "test_publishing_lifetimes_and_sources_change_no_bit": lambda c: c["dtype"] == "bf16",
    "test_publishing_and_hiding_change_no_bit": lambda c: c["dtype"] == "fp32",
    "test_checkpointed_and_repeated_modules_change_no_bit": lambda c: c["kind"] != "checkpointed",
    "test_overflow_in_one_replica_is_skipped_by_all": lambda c: c["stage"] == 1,
    "test_parity_in_low_precision": lambda c: (
        (c["stage"], c["dtype"]) in {(2, "bf16"), (3, "fp16")}
    ),
    "test_the_norm_is_that_of_the_whole_batch": lambda c: c["stage"] == 1,
    "test_accessors_see_whole_momentum": lambda c: c["stage"] == 1,
    # test_hsdp_checkpoint
    "test_checkpoints_continue_and_move_between_numbers_of_replicas": lambda c: (
        c["stage"] == 3 and not c["config"]
    ),
    "test_a_run_without_replicas_gains_them": lambda c: c["stage"] == 2,
    "test_a_killed_rank_ends_all_and_the_last_checkpoint_loads": lambda c: c["stage"] == 2,
    # lifetimes and sources of gathered matrices
    "test_sources_do_not_change_a_bit": lambda c: (
        c["kind"] in ("reentrant", "twice", "plain") or c["dtype"] == "fp16"
    ),
    "test_lifetimes_do_not_change_a_bit": lambda c: c["kind"] in ("reentrant", "twice"),
    "test_lifetimes_are_independent_of_zeros_settings": lambda c: not c["zero_init"],
    # test_traffic
    "test_gradients_cost_u_in_as_many_calls_at_any_world_size": lambda c: c["stage"] == 1,
    "test_steps_leave_nothing_behind": lambda c: c["stage"] != 3,
    "test_newton_schulz_runs_once_per_matrix_in_the_world": lambda c: (
        c["world"] == 2 and c["stage"] in (1, 3)
    ),
    # test_hidden_gather
    "test_hiding_does_not_change_a_bit": lambda c: (
        (c["stage"], c["dtype"], c["kind"])
        not in {
            (1, "fp32", "plain"),
            (2, "fp32", "borrowing"),
            (2, "bf16", "plain"),
            (1, "fp16", "borrowing"),
        }
    ),
    "test_weights_may_be_moved_and_replaced_between_steps": lambda c: (
        (c["how"], c["hsdp"]) != ("replaced", True)
    ),
    # test_checkpoint
    "test_resume_continues_bit_equal": lambda c: (
        c["momentum_dtype"] == "bf16"
        and c["name"] not in ("stage 0 bf16", "stage 2 bf16", "stage 3")
    ),
    "test_entry_names_every_element_of_every_parameter_once": lambda c: c["stage"] in (0, 2),
    # test_parity
    "test_parity_in_bf16": lambda c: c["stage"] in (0, 2),
    "test_parity_with_clip_decay_and_accumulation": lambda c: (
        (c["world"], c["stage"]) in {(1, 0), (1, 1), (1, 3), (3, 0), (3, 1), (2, 1)}
    ),
    "test_parity_with_two_threads": lambda c: c["stage"] in (0, 1),
    "test_matrices_cut_by_partition_edges": lambda c: c["stage"] == 1 and c["world"] != 3,
    # others
    "test_many_steps_with_two_buckets_in_flight": lambda c: c["steps"] == 200,
    "test_bits_do_not_depend_on_the_hooks": lambda c: c["stage"] == 1,
    "test_partly_frozen_models_train": lambda c: (
        c["stage"] == 1 or (c["stage"] != 3 and c["keep"] in ("matrices", "two vectors"))
    ),
    "test_a_skipped_step_leaves_no_trace": lambda c: c["stage"] == 1,
    "test_static_scales_and_growth_give_the_same_update": lambda c: c["stage"] == 1,
    "test_a_tau_out_of_reach_changes_no_bit_and_costs_one_call": lambda c: (
        c["cell"]["stage"] in (0, 1)
    ),
    "test_updates_of_other_replicas_are_scaled_too": lambda c: c["stage"] == 2,
    # .ci/run starts the command itself
    "test_the_command_launches_ranks": lambda c: True,
    "test_traffic_is_what_plans_predict": lambda c: c["stage"] == 1,
    "test_sound_training_passes_every_check": lambda c: (
        (c["stage"], c["dtype"]) not in {(0, "fp32"), (2, "bf16"), (3, "fp32")}
    ),
    "test_matrices_rebuilt_from_fragments_are_the_parameters": lambda c: (
        c["world"] == 4
        and c["name"] != "stage 3"
        or c["name"] in ("stage 0 fp16", "stage 1 round robin", "stage 3 tiny sub-groups")
    ),
}


def repeats(name: str, cell: Cell) -> bool:
    """Whether a test's cell repeats others and is left out of this run."""
    rule = REPEATS.get(name)
    return rule is not None and not FULL_GRID and rule(cell)
