"""Seconds of a data-parallel group's communication under each ZeRO stage, by the formulas of Rajbhandari et al. 2020,
section 7.

`cost` multiplies them by what `Rates.zero` has measured of this runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Link


@dataclass(frozen=True)
class DataParallelGroup:
    """The replicas of one model.

    Args:
        dp: number of replicas.
        overlap: fraction of the communication that overlaps with arithmetic.
        layers: of the model, each of which ZeRO-3 gathers by itself.
    """

    link: Link
    dp: int
    overlap: float
    layers: int

    def gather_parameters(self, size: float, compute: float) -> float:
        """ZeRO-3: seconds of gathering all parameters once that do not overlap with the arithmetic.

        Args:
            size: bytes of the parameters.
            compute: seconds of the arithmetic beside it.
        """
        gather = self.link.gather(size, self.dp) + (self.layers - 1) * self.link.collective_latency / 2
        return gather - self.overlap * min(gather, compute)

    def optimizer_step(
        self, stage: int, size: float, weights: float, parameters: float, micro: int, compute: float
    ) -> float:
        """Seconds of one optimizer step's communication that do not overlap with the backward.

        Args:
            size: bytes of the gradients that a rank computes.
            weights: bytes of the parameters that these are of, which stages 1 and 2 gather after the step.
            parameters: bytes of all parameters, which stage 3 gathers.
            micro: number of micro-batches.
            compute: seconds of the forward and backward of one of them.
        """
        under = self.overlap * compute * 2 / 3
        scatter = self.link.gather(size, self.dp)
        exposed = scatter - self.overlap * min(scatter, under)
        match stage:
            case 0 | 1:
                reduction = self.link.all_reduce(size, self.dp)
                gathered = self.link.gather(weights, self.dp) if stage else 0.0
                return reduction - self.overlap * min(reduction, under) + gathered
            case 2:
                return micro * exposed + self.link.gather(weights, self.dp)
        return micro * (2 * self.gather_parameters(parameters, compute / 3) + exposed)
