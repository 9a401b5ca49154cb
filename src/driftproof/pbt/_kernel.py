"""The Gaussian-process kernel of PB2. Needs scikit-learn, so :mod:`driftproof.pbt.pb2` imports it on first use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.gaussian_process.kernels import (  # type: ignore[import-untyped]
    Hyperparameter,
    Kernel,
    NormalizedKernelMixin,
    StationaryKernelMixin,
)

Matrix = NDArray[np.float64]


class TimeVarying(StationaryKernelMixin, NormalizedKernelMixin, Kernel):  # type: ignore[misc]
    """``(1 - forgetting)^(|t - t'| / 2) * exp(-|x - x'|² / (2 length_scale²))``, with t in the first column.

    The time-varying kernel of Bogunovic et al. (arXiv 1601.06650), as in PB2 (arXiv 2002.02518).
    """

    def __init__(
        self,
        forgetting: float = 0.1,
        length_scale: float = 0.5,
        forgetting_bounds: tuple[float, float] = (1e-3, 0.5),
        length_scale_bounds: tuple[float, float] = (0.05, 5.0),
    ) -> None:
        self.forgetting = forgetting
        self.length_scale = length_scale
        self.forgetting_bounds = forgetting_bounds
        self.length_scale_bounds = length_scale_bounds

    @property
    def hyperparameter_forgetting(self) -> Any:
        return Hyperparameter("forgetting", "numeric", self.forgetting_bounds)

    @property
    def hyperparameter_length_scale(self) -> Any:
        return Hyperparameter("length_scale", "numeric", self.length_scale_bounds)

    def __call__(
        self,
        X: Matrix,  # noqa: N803, scikit-learn's name
        Y: Matrix | None = None,  # noqa: N803
        eval_gradient: bool = False,
    ) -> Matrix | tuple[Matrix, Matrix]:
        """Kernel matrix between rows, and its gradient with respect to log forgetting and log length scale."""
        other = X if Y is None else Y
        gap = np.abs(X[:, None, 0] - other[None, :, 0])
        square = ((X[:, None, 1:] - other[None, :, 1:]) ** 2).sum(-1)
        kernel: Matrix = (1 - self.forgetting) ** (gap / 2) * np.exp(-square / (2 * self.length_scale**2))
        if not eval_gradient:
            return kernel
        by_forgetting = -kernel * gap / 2 * self.forgetting / (1 - self.forgetting)
        by_length_scale = kernel * square / self.length_scale**2
        return kernel, np.stack([by_forgetting, by_length_scale], axis=-1)
