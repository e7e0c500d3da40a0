"""Which parameter is in which group, and what optimisers do with them."""

import copy

import pytest
import torch
from torch import nn

from polarlm.errors import UserError
from polarlm.model.build import build_model
from polarlm.training.optimisers import adamw, build_optimiser, muon, parameter_groups, parameter_roles

ADAMW = dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3, estimator_lr_factor=0.5)
MODEL = dict(context=16, d_model=16, n_layer=2, n_head=2)
BLOCKS = {"polar": "PolarAttention", "standard": "StandardAttention", "polar_literal": "PolarLiteral"}


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


def gpt(block="PolarAttention", **options):
    target = {"_target_": f"polarlm.attention.{block}", "_partial_": True}
    return build_model({"model": {**MODEL, **options}, "block": target}, 32)


def test_matrices_decay_vectors_and_marked_modules_do_not_and_nothing_is_counted_twice():
    model = Toy()
    groups = parameter_groups(parameter_roles(model))
    assert groups["decay"] == [model.matrix.weight]
    assert {id(p) for p in groups["no_decay"]} == {id(model.matrix.bias), id(model.free.weight)}
    assert groups["estimator"] == [model.nu.raw]


def test_estimator_scalars_have_their_own_learning_rate_and_no_decay():
    groups = {g["name"]: (g["lr"], g["weight_decay"]) for g in adamw(Toy(), **ADAMW).param_groups}
    assert groups == {"decay": (0.1, 0.3), "no_decay": (0.1, 0.0), "estimator": (0.05, 0.0)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("block", ["PolarAttention", "StandardAttention", "RobustFilterAttention"])
@pytest.mark.parametrize("build", [adamw, lambda m, **o: muon(m, momentum=0.95, **o)], ids=["adamw", "muon"])
def test_every_trainable_parameter_is_in_exactly_one_group(build, block, tied):
    model = gpt(block, tie_embeddings=tied)
    held = [id(p) for group in build(model, **ADAMW).param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("tied", "rest"), [(True, {"embedding.weight"}), (False, {"embedding.weight", "head.weight"})])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(tied, rest):
    model = gpt(tie_embeddings=tied)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["name"]: {names[id(p)] for p in g["params"]} for g in muon(model, momentum=0.95, **ADAMW).param_groups}
    hidden = groups["hidden"] | groups.get("hidden_no_decay", set())
    assert hidden and all(name.startswith("blocks.") and name.endswith(".weight") for name in hidden)
    assert {f"blocks.{i}.mixer.out.weight" for i in (0, 1)} <= hidden
    assert groups["decay"] == rest | {
        f"blocks.{i}.mixer.forget.weight" for i in (0, 1)
    }  # a gate is no map of the stream
    assert any("estimator" in name for name in groups["estimator"])


def test_muons_step_has_the_root_mean_square_of_adamws():
    """An orthogonal update scaled to 0.2 times the learning rate per element, whatever the shape."""
    torch.manual_seed(0)
    model = gpt("StandardAttention", d_model=64)
    optimiser = muon(model, momentum=0.95, **{**ADAMW, "weight_decay": 0.0})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimiser.step()
    for name in ("blocks.0.mixer.out.weight", "blocks.1.feed_forward.down.weight"):
        after = dict(model.named_parameters())[name]
        rms = (after - before[name]).square().mean().sqrt() / 0.1
        assert 0.12 < rms < 0.28, (name, float(rms))


def test_a_restored_muon_goes_on_with_the_same_bits():
    torch.manual_seed(0)
    first = gpt("StandardAttention")
    optimiser = muon(first, momentum=0.95, **ADAMW)

    def step(model, optimiser, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimiser.step()

    step(first, optimiser, 1)
    second = copy.deepcopy(first)
    restored = muon(second, momentum=0.95, **ADAMW)
    restored.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for seed in (2, 3):
        step(first, optimiser, seed)
        step(second, restored, seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_an_unknown_option_is_refused():
    section = {"_target_": "polarlm.training.optimisers.adamw", **ADAMW, "learning": 1, "grad_clip": 1.0}
    with pytest.raises(UserError, match="learning"):
        build_optimiser(section, Toy())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_numbered_as_the_model_lists_its_parameters_is_read_back(name, tmp_path):
    """What checkpoints hold: the numbers follow the model, torch reads it as if they followed the groups."""
    from polarlm.training.module import renumber
    from tests.training.tiny_jobs import composed

    config = composed(tmp_path, "block=polar", f"optim={name}")
    models = [build_model(config, 64) for _ in range(2)]
    first, second = (build_optimiser(config["optim"], model) for model in models)
    models[0].loss(torch.arange(16)[None], torch.arange(16)[None]).backward()
    first.step()
    state = first.state_dict()
    renumber(state, first, models[0])
    shapes = [parameter.shape for parameter in models[0].parameters()]
    for number, values in state["state"].items():
        assert all(x.shape in (shapes[number], ()) for x in values.values() if torch.is_tensor(x))
    second.load_state_dict(state)
    for one, two in zip(models[0].parameters(), models[1].parameters()):
        for key, value in first.state[one].items():
            assert torch.equal(torch.as_tensor(second.state[two][key]), torch.as_tensor(value)), key


def test_a_yaml_of_the_user_names_an_optimiser_class_and_no_function(tmp_path, monkeypatch):
    (tmp_path / "configs" / "optim").mkdir(parents=True)
    for number, target in enumerate(("torch.optim.SGD", "torch.utils.collect_env.run", "torch.nn.Linear")):
        (tmp_path / "configs" / "optim" / f"{number}.yaml").write_text(f"_target_: {target}\nlr: 0.1\n")
    monkeypatch.chdir(tmp_path)
    built = build_optimiser({"_target_": "torch.optim.SGD", "lr": 0.1, "grad_clip": 1.0}, torch.nn.Linear(2, 2))
    assert isinstance(built, torch.optim.SGD) and built.defaults["lr"] == 0.1
    for target in ("torch.utils.collect_env.run", "torch.nn.Linear"):
        with pytest.raises(UserError, match=r"not a subclass of torch\.optim"):
            build_optimiser({"_target_": target, "lr": 0.1}, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("stop", [False, True])
def test_a_muon_step_is_left_out_without_waiting_for_the_device(monkeypatch, stop):
    """Reading a flag on a GPU waits for all that was launched before: a Muon step must not do it."""
    models = [gpt("StandardAttention") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimisers = [muon(model, momentum=0.95, **ADAMW) for model in models]
    for step in range(3):
        for model, optimiser in zip(models, optimisers):
            optimiser.zero_grad()
            model.loss(*[torch.arange(8).view(1, 8)] * 2).backward()
            if stop and step == 1:
                for parameter in model.parameters():
                    parameter.grad.fill_(float("nan"))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__bool__", lambda self: pytest.fail("waits for the device"))
            patch.setattr(torch.Tensor, "item", lambda self: pytest.fail("waits for the device"))
            optimisers[0].suppress(torch.tensor(stop and step == 1))
            optimisers[0].step()
        if not (stop and step == 1):
            optimisers[1].step()
    for one, two in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(one, two)
