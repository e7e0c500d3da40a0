import torch
from torch import nn

from polarlm.training.optimiser import build_adamw, parameter_groups


class Scalar(nn.Module):
    optim_group = "estimator"

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(4, 2))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(3, 3)
        self.free = nn.Linear(3, 3, bias=False)
        self.free.optim_group = "no_decay"
        self.nu = Scalar()
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.matrix.weight


def test_matrices_decay_vectors_and_marked_modules_do_not_and_nothing_is_counted_twice():
    model = Toy()
    groups = parameter_groups(model)
    assert groups["decay"] == [model.matrix.weight]
    assert {id(p) for p in groups["no_decay"]} == {id(model.matrix.bias), id(model.free.weight)}
    assert groups["estimator"] == [model.nu.raw]


def test_estimator_scalars_have_their_own_learning_rate_and_no_decay():
    optimiser = build_adamw(Toy(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, estimator_lr_factor=0.5)
    found = {g["name"]: (g["lr"], g["weight_decay"]) for g in optimiser.param_groups}
    assert found == {"decay": (0.1, 0.3), "no_decay": (0.1, 0.0), "estimator": (0.05, 0.0)}
