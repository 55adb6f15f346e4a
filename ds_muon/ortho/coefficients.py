# SPDX-License-Identifier: Apache-2.0
"""Coefficient sets of the odd quintic p(x) = a*x + b*x^3 + c*x^5, one (a, b, c) per step.

Owns: every published set, its source, and the restarts that keep its Gram form stable.
Never does: iterate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientSet:
    """A published schedule.

    Attributes:
        triples: (a, b, c) per step, or the single triple that every step repeats.
        repeats: the one triple may be repeated for any number of steps.
        gram_restarts: number of steps -> the steps before which the Gram form recomputes X X^T.
            Absent: the Gram form of this set loses orthogonality and is refused.
        standin_restarts: the same where fp32 stands in for bf16, if fewer will do: the error stays
            below a tenth of that of bf16 products, whatever the spectrum.
        source: where the numbers were published.
    """

    triples: tuple[Triple, ...]
    gram_restarts: dict[int, tuple[int, ...]]
    source: str
    standin_restarts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    repeats: bool = False

    def schedule(self, steps: int, *, name: str) -> tuple[Triple, ...]:
        """Return `steps` triples, or raise ValueError if the set has no such schedule."""
        if self.repeats:
            return self.triples * steps
        lengths = {len(self.triples), *(k for k in self.gram_restarts if k <= len(self.triples))}
        if steps not in lengths:
            raise ValueError(
                f"ns_coefficients {name!r} is a schedule of {sorted(lengths)} steps, got "
                f"ns_steps = {steps}; leave ns_steps unset or use 'jordan', which repeats"
            )
        return self.triples[:steps]


def _scaled(raw: tuple[Triple, ...], safety: float) -> tuple[Triple, ...]:
    """p(x / s): shrink the input so that rounding cannot push a singular value past the bound."""
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in raw)


_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
_CUBIC_TAIL: Triple = (2.0, -1.5, 0.5)
_POLAR_EXPRESS_RAW: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
)

COEFFICIENTS: dict[str, CoefficientSet] = {
    "jordan": CoefficientSet(
        triples=(_JORDAN,),
        repeats=True,
        gram_restarts={5: (3,)},
        standin_restarts={5: ()},
        source="https://kellerjordan.github.io/posts/muon/",
    ),
    "you": CoefficientSet(
        triples=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        gram_restarts={5: (2,)},
        source="https://github.com/KellerJordan/modded-nanogpt (YouJiacheng, leloykun)",
    ),
    "polar_express": CoefficientSet(
        triples=_scaled(_POLAR_EXPRESS_RAW, 1.05),
        gram_restarts={5: (2,)},
        source="https://arxiv.org/abs/2505.16932, with the 1.05 safety of Gram Newton-Schulz",
    ),
    "polar_express_kj": CoefficientSet(
        triples=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        gram_restarts={5: (2,)},
        source="https://github.com/microsoft/dion, for X divided by 1.02",
    ),
    "polar_express_101": CoefficientSet(
        triples=(
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.875, -1.25, 0.375),
        ),
        gram_restarts={5: (1, 2), 8: (1, 2, 4)},
        source="https://github.com/NVIDIA-NeMo/Emerging-Optimizers",
    ),
    "cans": CoefficientSet(
        triples=(
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        gram_restarts={},
        source="https://arxiv.org/abs/2506.10935",
    ),
    "qwen_express": CoefficientSet(
        triples=(
            (8.3865, -24.3696, 17.7251),
            (4.1414, -3.0173, 0.5524),
            (3.9226, -2.8672, 0.5357),
            (3.2540, -2.3922, 0.4827),
            (2.2512, -1.5963, 0.3960),
        ),
        gram_restarts={},
        source="https://github.com/NVIDIA-NeMo/Emerging-Optimizers",
    ),
    "deepseek_v4": CoefficientSet(
        triples=(_JORDAN,) * 8 + (_CUBIC_TAIL,) * 2,
        gram_restarts={10: (2, 4, 6)},
        source="https://github.com/NVIDIA-NeMo/Emerging-Optimizers",
    ),
    "jordan_polish": CoefficientSet(
        triples=(_JORDAN,) * 5 + (_CUBIC_TAIL,) * 2,
        gram_restarts={7: (2, 4)},
        source="five steps of jordan, then two of the third-order Newton iteration",
    ),
    "cubic5": CoefficientSet(
        triples=(
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        gram_restarts={},
        source="https://github.com/NVIDIA-NeMo/Emerging-Optimizers",
    ),
}

# Sets that exist but would train in the wrong direction after a Frobenius normalisation.
REFUSED_SETS: dict[str, str] = {
    "aol": "its gain is negative for singular values above 0.884 unless rows are rescaled first "
    "(AOL), so a momentum dominated by one direction would change sign",
}


def coefficient_set(name: str) -> CoefficientSet:
    """Return the named set.

    Raises:
        ValueError: unknown or unsafe name, with the valid names.
    """
    if name in REFUSED_SETS:
        raise ValueError(f"ns_coefficients {name!r} is refused: {REFUSED_SETS[name]}")
    if name not in COEFFICIENTS:
        raise ValueError(
            f"ns_coefficients {name!r} is unknown; valid sets: {', '.join(COEFFICIENTS)}"
        )
    return COEFFICIENTS[name]
