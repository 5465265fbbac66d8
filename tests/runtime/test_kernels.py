"""The forms for few rows against PyTorch's own functions, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trtspec.runtime.kernels import Linear, RMSNorm, linear, rotate


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (1, 2), (2, 3), (16,), (17,), (0, 4)])
def test_a_product_is_the_linear_layer(rows: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(*rows, 48, dtype=dtype), random(80, 48, seed=1, dtype=dtype)
    bias = random(80, seed=2, dtype=dtype) if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for differentiable in (False, True):  # float32 takes another way where no gradient is asked for
        with torch.set_grad_enabled(differentiable):
            found = linear(x, weight, bias)
        assert found.shape == (*rows, 80)
        assert found.dtype == dtype
        torch.testing.assert_close(found, exact.to(dtype))


@pytest.mark.parametrize("rows", [1, 5])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    x, weight = random(16, 64), random(96, 64, seed=1)
    torch.testing.assert_close(linear(x[:rows], weight), linear(x, weight)[:rows], atol=0.0, rtol=2**-7)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_gradients_are_those_of_the_linear_layer(rows: int) -> None:
    inputs = [random(rows, 48), random(80, 48, seed=1), random(80, seed=2)]

    def gradients(product: object) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        product(*leaves).backward(random(rows, 80, seed=3))  # type: ignore[operator]
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for found, expected in zip(gradients(linear), gradients(F.linear), strict=True):
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)


def test_an_expert_of_a_stack_quantises_its_own_input() -> None:
    stack, x = random(3, 80, 48, dtype=torch.float32), random(4, 48, seed=1, dtype=torch.float32)
    layer = Linear(stack, None, lambda rows, expert: rows * (10 if expert == 2 else 1))
    torch.testing.assert_close(layer(x, 1), F.linear(x, stack[1]))
    torch.testing.assert_close(layer(x, 2), F.linear(10 * x, stack[2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_is_rms_norm(dtype: torch.dtype) -> None:
    weight = random(48, seed=1, dtype=dtype)
    for x in (
        random(2, 7, 48, dtype=dtype),
        random(2, 48, 7, dtype=dtype).transpose(1, 2),
        torch.zeros(3, 48).to(dtype),
    ):
        for scale in (1.0, 1e-3):  # where epsilon does not matter, and where it does
            given = x * scale
            torch.testing.assert_close(RMSNorm(weight, 1e-5)(given), F.rms_norm(given, (48,), weight, 1e-5))


def test_gradients_are_those_of_rms_norm() -> None:
    x, weight = random(5, 48, dtype=torch.float32), random(48, seed=1, dtype=torch.float32)
    ours, theirs = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    RMSNorm(ours[1], 1e-5)(ours[0]).square().sum().backward()
    F.rms_norm(theirs[0], (48,), theirs[1], 1e-5).square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_norm_made_for_inference_can_be_trained_through() -> None:
    weight = torch.ones(8)
    with torch.inference_mode():
        norm = RMSNorm(weight, 1e-5)
    x = random(2, 8, dtype=torch.float32).requires_grad_()
    norm(x).square().sum().backward()
    assert x.grad is not None


def test_a_rotation_turns_each_pair() -> None:
    x, angles = random(1, 2, 3, 8, dtype=torch.float32), random(3, 4, seed=1, dtype=torch.float32)
    sine = angles.sin()
    found = rotate(x, torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((-sine, sine), dim=-1))
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), dim=-1))
