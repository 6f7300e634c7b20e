"""The product behind every matrix of a model: small and large, with and without gradients."""

import pytest
import torch

from anydepth.ops.linear import LARGE, linear, pack, unpack


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 33])
@pytest.mark.parametrize("size", [(64, 192), (512, 1536)])
def test_equals_the_plain_product(rows, size):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, size[0], generator=generator), torch.randn(*size, generator=generator)
    assert (weight.numel() >= LARGE) == (size[0] == 512)
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight), x @ weight, atol=1e-3, rtol=1e-5)


def test_strided_rows_and_weights():
    x, weight = torch.randn(9, 2048)[::2, :512], torch.randn(1536, 512).t()
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight), x @ weight, atol=1e-3, rtol=1e-5)


def test_gradients_flow_where_they_are_recorded():
    weight = torch.randn(512, 1536, requires_grad=True)
    linear(torch.ones(2, 512), weight).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((512, 1536), 2.0))


def test_float64_stays_float64():
    with torch.inference_mode():
        assert (
            linear(torch.ones(2, 512, dtype=torch.float64), torch.ones(512, 1536, dtype=torch.float64)).dtype
            == torch.float64
        )


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
def test_a_packed_weight_gives_the_same_products_and_comes_back_whole(rows):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 512, generator=generator), torch.randn(512, 1536, generator=generator)
    packed = pack(weight)
    assert packed.is_mkldnn and pack(packed) is packed
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, packed), x @ weight, atol=1e-3, rtol=1e-5)
    assert torch.equal(unpack(packed), weight) and unpack(weight) is weight


@pytest.mark.parametrize("weight", [torch.ones(64, 192), torch.ones(512, 1536, dtype=torch.float64)])
def test_what_gains_nothing_is_not_packed(weight):
    assert pack(weight) is weight


def test_a_packed_weight_refuses_to_lose_a_gradient():
    with pytest.raises(AssertionError, match="unpack"):
        linear(torch.ones(2, 512, requires_grad=True), pack(torch.ones(512, 1536)))
