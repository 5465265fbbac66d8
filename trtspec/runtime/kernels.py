"""Linear layers, norms and rotations, in the forms that cost least for the few rows of a decoding pass on a CPU.

There a pass over one to sixteen tokens should take as long as its weights need to come from memory, so what counts is
that a product reads them once, as they lie, and that few small operators stand between the products. Knows tensors
only; all of it can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_FEW_ROWS = 16  # more gain nothing: what they compute takes longer than the weights need to come
_FEW_FLOAT32_ROWS = 8  # MKL makes `weight @ x^T` of these in up to half the time oneDNN takes for `x @ weight^T`
_MANY_ROWS = 32  # oneDNN keeps half a MiB of code for every number of rows: many are filled up to a multiple of this
# PyTorch multiplies float32 with MKL, which is up to twice as slow as oneDNN on CPUs without AVX-512.
_ONEDNN_FLOAT32 = torch.backends.mkldnn.is_available() and "AVX512" not in torch.backends.cpu.get_cpu_capability()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` for x `[.., in]`; of few rows on a CPU the result may lie in memory column by column.

    Libraries rearrange the right factor before they multiply. In `x @ weight^T` that is the weight, for half again the
    time that it takes to read it; in `weight @ x^T` it is the few rows. Both round alike.
    """
    rows = x.numel() // x.shape[-1]
    float32 = _ONEDNN_FLOAT32 and x.dtype == torch.float32 and x.is_cpu and not torch.is_grad_enabled()
    if float32 and 1 < rows <= _FEW_FLOAT32_ROWS:
        return _by_columns(x, weight, bias, rows)
    if float32 and rows:
        missing = -rows % _MANY_ROWS if rows > _FEW_ROWS else 0
        if not missing:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        filled = F.pad(x.reshape(rows, -1), (0, 0, 0, missing))
        product = torch.ops.mkldnn._linear_pointwise(filled, weight, bias, "none", [], "")
        return product[:rows].view(*x.shape[:-1], -1)
    if x.dtype != torch.bfloat16 or not x.is_cpu or not 1 <= rows <= _FEW_ROWS:
        return F.linear(x, weight, bias)
    if rows == 1:
        row = x.reshape(-1)
        product = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return product.view(*x.shape[:-1], -1)
    return _by_columns(x, weight, bias, rows)


def _by_columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    columns = x.reshape(rows, -1).t()
    product = torch.mm(weight, columns) if bias is None else torch.addmm(bias.unsqueeze(1), weight, columns)
    return product.t().view(*x.shape[:-1], -1)


class Linear:
    """A linear layer, or a stack of them, one an expert.

    Args:
        weight: `[out, in]` or `[experts, out, in]`.
        bias: `[out]`.
        quantizer: what a quantised engine does to the input, given it and the number of the expert.
    """

    __slots__ = ("bias", "quantizer", "weight")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        quantizer: Callable[[torch.Tensor, int | None], torch.Tensor] | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.quantizer = quantizer

    def __call__(self, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """`[.., out]` of x `[.., in]`."""
        if self.quantizer is not None:
            x = self.quantizer(x, expert)
        return linear(x, self.weight if expert is None else self.weight[expert], self.bias)


class RMSNorm:
    """The norm over the last dimension, rounded once.

    `F.rms_norm` takes ten operators on a CPU, two of them over float32 copies of x; this takes six.
    """

    __slots__ = ("_added", "_epsilon", "_weight")

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        self._added = torch.tensor([epsilon])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[.., size]`, normalised and scaled."""
        size = x.shape[-1]
        if not x.is_cpu:
            return F.rms_norm(x, (size,), self._weight, self._epsilon)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._added, norm, norm, value=1 / size).rsqrt()
        return (x * scale * self._weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split convention: x, cos, sin broadcast over `[B, heads, Q, head]`.

    The first half of `sin` is negated, as `rope_table` gives it.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
