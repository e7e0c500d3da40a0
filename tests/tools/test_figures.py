"""The paper's figures are drawn, and show what geometry says they show."""

import torch

from polarlm.geometry.covariance import rt_covariance
from tools import figures


def test_every_picture_is_written_and_small(tmp_path):
    figures.main(str(tmp_path))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"model.png", "filter.png", "covariance.png", "update.png"}
    assert all(5_000 < size < 150_000 for size in sizes.values())


def test_a_carried_covariance_is_the_rt_covariance_at_the_carried_direction():
    carried = figures.covariances()
    for u, sigma in zip(carried["u"], carried["sigma"]):
        torch.testing.assert_close(sigma, rt_covariance(u, 0.2**2, 0.07**2))
    assert (carried["u"][0] - carried["u"][2]).norm() > 0.5


def test_the_step_is_tangent_and_its_retraction_on_the_sphere():
    seen = figures.estimate()
    assert abs(seen["step"] @ seen["query"]) < 1e-12
    torch.testing.assert_close(seen["retracted"].norm(), torch.ones((), dtype=torch.float64))
    assert seen["weights"][:4].mean() < seen["weights"][4:].mean()  # outliers count less
    assert seen["ambient"].norm() > 1


def test_the_state_is_magnitude_times_direction_and_only_the_standard_step_is_radial():
    path, drawn = figures.trajectory(), figures.updates()
    torch.testing.assert_close(path["x"].norm(dim=-1), path["m"])
    assert (path["m"].diff() < 0).all()
    assert abs((drawn["polar"] - drawn["x"]) @ drawn["x"]) < 1e-12
    assert (drawn["standard"] - drawn["x"]) @ drawn["x"] > 0.1
