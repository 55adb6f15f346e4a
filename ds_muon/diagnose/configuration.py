# SPDX-License-Identifier: Apache-2.0
"""Configuration: judge a ds_config.json on a machine, without a model and without ranks.

Owns: hints on the usual causes of a memory peak and of slow steps. Sizes are upper bounds of the
settings; `ds_muon plan` has those of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ds_muon.diagnose.acceptance import Examined, examine
from ds_muon.diagnose.findings import Finding, Level
from ds_muon.diagnose.machine import Machine
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.preview.config_file import ConfigFile
from ds_muon.zero.inspection import ZeroKnobs

_GIB = 2**30
# Above this, in bytes, a buffer is worth a line.
_WORTH_SAYING = 256 * 2**20
_DEFAULT_SUB_GROUP = 10**9


def judge_file(path: Path, machine: Machine) -> list[Finding]:
    """Say what is wrong with a ds_config.json, what it takes and what it makes slow."""
    try:
        found = examine(path)
    except ValueError as error:
        return [_say("config", "problem", line) for line in str(error).splitlines()]
    return [
        _say("config", "ok", f"{path}: DMuon's keys are valid"),
        *(_say("config", "problem", text) for text in found.problems),
        *judge_settings(found, machine),
    ]


def judge_settings(examined: Examined, machine: Machine) -> list[Finding]:
    """Say what a valid configuration takes and what it makes slow."""
    found, read = [], examined.read
    knobs = None if examined.foreseen is None else examined.foreseen.knobs
    if knobs is not None:
        found += [*_zero_memory(read, knobs), *_zero_speed(read, knobs)]
    return [*found, *_own_memory(read, machine), *_own_speed(read, examined.spec, machine)]


def _say(topic: str, level: Level, text: str) -> Finding:
    return Finding(topic=topic, level=level, text=text)


def _memory(text: str) -> Finding:
    return _say("memory", "hint", text)


def _speed(text: str) -> Finding:
    return _say("speed", "hint", text)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"


def _zero_memory(read: ConfigFile, knobs: ZeroKnobs) -> Iterator[Finding]:
    weight = 2 if read.low_precision else 4
    reduce_bytes = knobs.reduce_bucket * weight * (2 if knobs.overlap_comm else 1)
    if knobs.stage and reduce_bytes >= _WORTH_SAYING:
        twice = " in two buckets, since overlap_comm is on" if knobs.overlap_comm else ""
        yield _memory(
            f"reduce_bucket_size = {knobs.reduce_bucket:.3g} elements: up to "
            f"{_gib(reduce_bytes)} of gradients on their way{twice}"
        )
    if knobs.stage in (1, 2) and knobs.allgather_bucket * weight >= _WORTH_SAYING:
        yield _memory(
            f"allgather_bucket_size = {knobs.allgather_bucket:.3g} elements: up to "
            f"{_gib(knobs.allgather_bucket * weight)} at the end of a step"
        )
    if knobs.stage == 3:
        yield _memory(
            f"stage3_max_live_parameters = {knobs.max_live:.3g}: up to "
            f"{_gib(knobs.max_live * weight)} of gathered weights at a time; "
            f"stage3_prefetch_bucket_size = {knobs.prefetch:.3g} are fetched ahead, and "
            f"stage3_max_reuse_distance = {knobs.max_reuse:.3g} keeps what is used again soon"
        )
        if knobs.persistence * weight >= 2**20:
            yield _memory(
                f"stage3_param_persistence_threshold = {knobs.persistence:.3g}: parameters below "
                "that many elements are never freed, matrices too"
            )
    if read.low_precision and read.gradient_bytes == 4:
        whole = "the whole model's" if knobs.stage < 2 else "a partition's"
        yield _memory(
            f"data_types.grad_accum_dtype fp32: {whole} gradients take 4 bytes an element, not 2"
        )


def _zero_speed(read: ConfigFile, knobs: ZeroKnobs) -> Iterator[Finding]:
    config = read.params
    if knobs.stage in (1, 2) and read.own_reduction and not read.makes_bf16_optimizer:
        yield _speed(
            f"{read.own_reduction}: DeepSpeed's own reduction carries the gradients, by all-reduce "
            "with twice the elements of reduce_scatter_v, or in one call per rank and bucket"
        )
    if knobs.stage in (1, 2) and not (config.hide_param_gather or read.makes_bf16_optimizer):
        yield _speed(
            "hide_param_gather is false: every step waits for the gather of all weights, which "
            "true moves under the next forward"
        )
    if knobs.stage == 3 and knobs.sub_group < _DEFAULT_SUB_GROUP:
        yield _speed(
            f"sub_group_size = {knobs.sub_group:.3g}: a rank's matrices are stepped in parts of "
            "that many elements, each planned alone, so owners are less balanced; `ds_muon plan` "
            "says by how much"
        )


def _own_memory(read: ConfigFile, machine: Machine) -> Iterator[Finding]:
    config = read.params
    sets = 3 if config.max_inflight_buckets == 2 else 1
    yield _memory(
        f"workspace_mb = {config.workspace_mb}: exchange ({sets} "
        f"{'sets' if sets > 1 else 'set'} of buffers) and Newton-Schulz together, kept between "
        f"steps: {str(config.preallocate_workspace).lower()}; a larger matrix runs alone above it"
    )
    if config.reshard_after_forward is False:
        yield _memory(
            "reshard_after_forward is false (Z2): every rank holds all matrices, whole and in "
            "16 bit where training is, from the first forward to the step"
        )
    if config.param_source == "owner_broadcast":
        yield _memory(
            "param_source owner_broadcast: owners keep their matrices packed beside ZeRO's shards"
        )
    if config.hsdp is not None and config.hsdp.publish == "async":
        yield _memory(
            "hsdp.publish async: updates on their way between replicas, up to a rank's share of "
            "the matrices in 16 bit or fp32"
        )
    if machine.accelerator != "cpu":
        own = 1 + (config.hide_param_gather or config.param_source == "owner_broadcast")
        own += 3 if config.hsdp is not None else 0
        yield _memory(
            f"{own} communicator(s) of DMuon's own take memory beside torch's allocator; the "
            "start-up line says how much, `ds_muon plan` estimates it"
        )


def _own_speed(read: ConfigFile, spec: OrthoSpec, machine: Machine) -> Iterator[Finding]:
    config = read.params
    if config.exchange != "auto":
        yield _speed(
            f'exchange = "{config.exchange}": auto takes the least predicted elements and calls '
            "for the model; `ds_muon plan` shows both"
        )
    dtype = str(spec.compute_dtype).removeprefix("torch.")
    native = {
        "float32": True,
        "bfloat16": machine.bf16_products,
        "float16": machine.fp16_products,
    }[dtype]
    if machine.accelerator == "cpu" and not native:
        if spec.native_products:
            yield _speed(
                f'recipe "{config.recipe}" multiplies in {dtype} as torch does, which this CPU '
                "does 10 to 100 times slower than fp32; ns_dtype fp32 avoids it"
            )
        elif config.ns_dtype is not None:
            yield _speed(
                f'ns_dtype = "{config.ns_dtype}" is emulated on this CPU (fp32 products, each '
                "rounded); without the key Newton-Schulz computes in fp32 here, which is faster"
            )
    if machine.accelerator == "cpu" and read.low_precision and not machine.bf16_products:
        yield _speed("16-bit forward and backward are slow on this CPU; train in fp32 here")
    if config.max_inflight_buckets == 1 and machine.devices > 1:
        yield _speed(
            "max_inflight_buckets = 1: Newton-Schulz waits for its bucket's exchange; 2 overlaps "
            "them for three sets of exchange buffers"
        )
    if config.hsdp is not None and config.hsdp.publish == "sync":
        yield _speed("hsdp.publish sync: every step waits for the other replicas' updates")
    if not config.preallocate_workspace:
        yield _speed("preallocate_workspace is false: every step allocates its working memory")
    if config.verify_every == 1:
        yield _speed("verify_every = 1: a matrix is recomputed and all ranks compare every step")
