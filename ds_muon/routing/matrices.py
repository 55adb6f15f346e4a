# SPDX-License-Identifier: Apache-2.0
"""Matrices: the logical matrices of one parameter, and where they stand in it.

Owns: shapes (what is a matrix at all), and the cut of a stored matrix along its rows or columns.
Which cut it is: the user's `split`, then heads if `per_head_muon` asks for them, then fused.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from ds_muon.config import DMuonConfig
from ds_muon.plan.layout import Matrix, Placement
from ds_muon.routing.fused import Part, fused_parts, head_parts
from ds_muon.routing.sites import Site

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a stored matrix is cut into logical ones.

    Attributes:
        axis: ROWS or COLUMNS, as stored.
        parts: of one period; the period repeats along the axis, and what has the same place in
            every period is one matrix.
        per_head: each head of a part is a matrix of its own instead.
        why: what reports say of it.
    """

    axis: int
    parts: tuple[Part, ...]
    per_head: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """The matrices of a parameter, or the reason why it has none.

    Attributes:
        kind: what reports say of them.
        per_head: whether they are heads because `per_head_muon` asked for it.
    """

    placements: tuple[Placement, ...] = ()
    why_not: str = ""
    kind: str = ""
    per_head: bool = False


def logical_matrices(site: Site, config: DMuonConfig) -> Logical:
    """Return a parameter's logical matrices.

    Raises:
        ValueError: the user's `split` does not fit.
    """
    shape, why_not = _stored(site)
    if why_not:
        return Logical(why_not=why_not)
    stack, rows, cols = shape
    transposed = site.transposed
    cut = _asked(site, shape, transposed, config) or _recognised(site, shape, transposed, config)
    placements = []
    for index in range(stack):
        prefix = f"{site.name}[{index}]" if stack > 1 else site.name
        for label, height, width, offset, run, stride in _pieces(rows, cols, cut):
            matrix = Matrix(name=prefix + label, rows=height, cols=width, transposed=transposed)
            start = index * rows * cols + offset
            placements.append(Placement(matrix=matrix, offset=start, run=run, stride=stride))
    kind = _kind(site) + (f", {cut.why}" if cut and cut.why else "")
    per_head = cut is not None and cut.per_head and first_match(site.name, config.split) is None
    return Logical(placements=tuple(placements), kind=kind, per_head=per_head)


def first_match(name: str, globs: Iterable[str]) -> str | None:
    """The first pattern that a name matches."""
    return next((glob for glob in globs if fnmatch.fnmatchcase(name, glob)), None)


def _stored(site: Site) -> tuple[tuple[int, int, int], str]:
    """(stack, rows, cols) of a parameter, or why it is no matrix."""
    shape, nothing = site.shape, (0, 0, 0)
    if len(shape) < 2:
        return nothing, f"{len(shape)}-D"
    convolution = site.convolution
    if convolution is not None:
        if convolution.groups > 1:
            return nothing, "depthwise or grouped convolution"
        shape = (shape[0], torch.Size(shape[1:]).numel())
    elif any(isinstance(m, ParametrizationList) for m in site.owners):
        return nothing, "part of a parametrized weight"
    elif len(shape) == 3 and shape[0] == 1:
        return nothing, "a table with a leading dimension of 1"
    if len(shape) > 3:
        return nothing, f"{len(shape)}-D outside a convolution"
    stack, rows, cols = (1, *shape) if len(shape) == 2 else shape
    if min(rows, cols) < 2:
        return nothing, f"a side of {min(rows, cols)}"
    return (stack, rows, cols), ""


def _kind(site: Site) -> str:
    if site.convolution is not None:
        return "convolution, flattened to (out, in * kernel)"
    dims = len(site.shape)
    return "matrix" if dims == 2 else f"{dims}-D, one matrix per leading index"


def _recognised(
    site: Site, shape: tuple[int, int, int], transposed: bool, config: DMuonConfig
) -> Cut | None:
    """The cut that the model's own description says, checked against the shape."""
    if site.convolution is not None:
        return None
    axis = COLUMNS if transposed else ROWS
    outputs, inputs = shape[1 + axis], shape[2 - axis]
    if config.per_head_muon:
        heads = head_parts(site, outputs)
        if heads is not None:
            return Cut(axis=axis, parts=heads, per_head=True, why="one matrix per head")
    fused = fused_parts(site, outputs, inputs)
    if fused is None:
        return None
    labels = ", ".join(part.label for part in fused)
    if config.per_head_muon and all(part.head > 1 for part in fused):
        return Cut(axis=axis, parts=fused, per_head=True, why=f"one per head of {labels}")
    return Cut(axis=axis, parts=fused, per_head=False, why=f"cut into {labels}")


def _asked(
    site: Site, shape: tuple[int, int, int], transposed: bool, config: DMuonConfig
) -> Cut | None:
    """The cut that `split` asks for; a whole matrix is a cut into one part."""
    glob = first_match(site.name, config.split)
    if glob is None:
        return None
    [(kind, value)] = config.split[glob].items()
    if kind == "experts" and (len(site.shape) != 3 or site.convolution is not None):
        raise ValueError(
            f'split[{glob!r}] = {{"experts": true}} asks {site.name} of shape {site.shape} for one '
            'matrix per leading index, and it is no stack; {"none": true} keeps it whole'
        )
    outputs = COLUMNS if transposed else ROWS
    axis = {"rows": ROWS, "cols": COLUMNS}.get(kind, outputs)
    lines = shape[1 + axis]
    if kind in ("none", "experts"):
        return Cut(axis=axis, parts=(Part("", lines),), per_head=False, why="")
    sizes = [lines // value] if kind == "heads" else list(value)
    repeats = lines // sum(sizes) if kind in ("heads", "interleaved") and sum(sizes) else 1
    if sum(sizes) * repeats != lines or (kind == "heads" and repeats != value) or min(sizes) < 1:
        raise ValueError(_misfit(site.name, glob, kind, value, lines, axis))
    least = min(sizes) * (1 if kind == "heads" else repeats)
    if least < 2 or shape[2 - axis] < 2:
        raise ValueError(_misfit(site.name, glob, kind, value, lines, axis))
    if kind == "heads":
        parts = (Part("head", sizes[0], sizes[0]),)
        return Cut(axis=axis, parts=parts, per_head=True, why=f"split by {glob!r}")
    parts = tuple(_numbered(kind, sizes))
    return Cut(axis=axis, parts=parts, per_head=False, why=f"split by {glob!r}")


def _numbered(kind: str, sizes: list[int]) -> Iterator[Part]:
    start = 0
    for number, size in enumerate(sizes):
        label = f"part {number}" if kind == "interleaved" else f"{kind} {start}:{start + size}"
        yield Part(label, size)
        start += size


def _misfit(name: str, glob: str, kind: str, value: Any, lines: int, axis: int) -> str:
    line = ("rows", "columns")[axis]
    rule = {
        "heads": f"{value} equal blocks of at least 2 {line}",
        "interleaved": f"a whole number of periods of {sum(value) if kind == 'interleaved' else 0} "
        f"{line}, with at least 2 {line} to a matrix",
    }.get(kind, f"blocks of at least 2 {line}")
    return (
        f"split[{glob!r}] = {{{kind!r}: {value}}} does not cut the {lines} {line} of {name} into "
        f"{rule}"
    )


def _pieces(rows: int, cols: int, cut: Cut | None) -> Iterator[tuple[str, int, int, int, int, int]]:
    """(label, rows, cols, offset, run, stride) of every matrix; run 0: it is one range."""
    if cut is None or (len(cut.parts) == 1 and not cut.per_head):
        yield "", rows, cols, 0, 0, 0
        return
    lines, period = (rows, cols)[cut.axis], sum(part.size for part in cut.parts)
    repeats, before = lines // period, 0
    for part in cut.parts:
        if cut.per_head:
            starts = [
                turn * period + before + first
                for turn in range(repeats)
                for first in range(0, part.size, part.head)
            ]
            for number, start in enumerate(starts):
                label = f"[{part.label} {number}]" if part.label else f"[head {number}]"
                yield label, *_lines(rows, cols, cut.axis, start, part.head, lines, 1)
        else:
            label = f"[{part.label}]"
            yield label, *_lines(rows, cols, cut.axis, before, part.size, period, repeats)
        before += part.size


def _lines(
    rows: int, cols: int, axis: int, start: int, size: int, period: int, repeats: int
) -> tuple[int, int, int, int, int]:
    """`size` lines of every `period`, `repeats` times, from `start` on."""
    if axis == COLUMNS:
        return rows, size * repeats, start, size, period
    run, stride = (0, 0) if repeats == 1 else (size * cols, period * cols)
    return size * repeats, cols, start * cols, run, stride
