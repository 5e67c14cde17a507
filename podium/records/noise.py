"""The gradient noise scale, from the gradients of one synchronous step.

B_noise = tr(S) / |G|^2, from the squared norms of one worker's gradient (b samples) and of the whole step's (B):
|G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b) and tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), each averaged over steps before
they are divided.

McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018, https://arxiv.org/abs/1812.06162
"""

from __future__ import annotations


class NoiseMeter:
    """Measures the gradient noise scale on one worker of a synchronous step."""

    def __init__(self, decay: float = 0.95) -> None:
        self._decay = decay
        self._own = self._signal = self._scatter = 0.0
        self._count = 0
        self.scale: float | None = None
        """The noise scale as of the last step; None where it is unknown."""

    def add_own(self, squared_norm: float) -> None:
        """Add the squared norm of a part of this worker's weighted gradient, before the sum over the workers."""
        self._own += squared_norm

    def forget(self) -> None:
        """Discard the current step, which is undone."""
        self._own = 0.0

    def step_done(self, whole: float, weight: float, own_samples: int) -> float | None:
        """The noise scale so far; `whole` is the squared norm of the step's gradient, `weight` this worker's part."""
        self.scale = self._measure(whole, weight, own_samples)
        return self.scale

    def _measure(self, whole: float, weight: float, own_samples: int) -> float | None:
        own, self._own = self._own / weight**2, 0.0
        if not 0 < weight < 1:
            return None
        samples = own_samples / weight
        signal = (samples * whole - own_samples * own) / (samples - own_samples)
        scatter = (own - whole) / (1 / own_samples - 1 / samples)
        self._signal = self._decay * self._signal + (1 - self._decay) * signal
        self._scatter = self._decay * self._scatter + (1 - self._decay) * scatter
        self._count += 1
        return self._scatter / self._signal if self._signal > 0 else None
