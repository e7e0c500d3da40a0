"""RMSNorm is its formula in every precision."""

import pytest
import torch

from polarlm.model.block import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-7), (torch.bfloat16, 1e-2)], ids=str
)
def test_a_norm_divides_by_the_root_of_mean_square_and_epsilon(dtype, error):
    norm = RMSNorm(8, eps=0.5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 8).to(dtype)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.5).sqrt() * norm.weight.double()
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x).double(), expected, rtol=error, atol=error)
