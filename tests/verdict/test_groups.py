"""Runs belong together when only their seed differs; everything else is named."""

from polarlm.runs.reading import read_run
from polarlm.verdict.groups import choose_baselines, config_differences, group_runs
from tests.synthetic_runs import write_run, write_sweep


def test_seeds_of_a_block_form_a_group_with_the_baseline_first(tmp_path):
    runs = [read_run(f) for f in write_sweep(tmp_path, blocks=("polar", "standard"), diagnostics=False)]
    groups = group_runs(runs)
    assert [g.label for g in groups] == ["standard", "polar"]
    assert groups[1].seeds == (1, 2, 3)


def test_a_varied_setting_of_a_block_splits_that_block_only(tmp_path):
    runs = [
        read_run(write_run(tmp_path / "a", "standard", diagnostics=False)),
        read_run(write_run(tmp_path / "b", "polar", diagnostics=False)),
        read_run(write_run(tmp_path / "c", "polar", diagnostics=False, changes={"block.kernel": "gaussian"})),
    ]
    groups = group_runs(runs)
    assert [g.label for g in groups] == ["standard", "polar · influence=gaussian", "polar · influence=student"]
    assert groups[0].surroundings() == groups[1].surroundings() == ()


def test_a_varied_setting_outside_the_block_splits_all_and_counts_as_surroundings(tmp_path):
    runs = [
        read_run(write_run(tmp_path / f"{block}{lr}", block, diagnostics=False, changes={"optim.lr": lr}))
        for block in ("standard", "polar")
        for lr in (1e-3, 3e-3)
    ]
    groups = group_runs(runs)
    assert [g.label for g in groups] == [
        "standard · lr=0.001",
        "standard · lr=0.003",
        "polar · lr=0.001",
        "polar · lr=0.003",
    ]
    assert groups[0].surroundings() == groups[2].surroundings() != groups[1].surroundings()


def test_a_choice_is_named_by_itself_and_not_by_its_settings(tmp_path):
    runs = []
    for choice, width in (("nano", 128), ("tiny", 256)):
        folder = write_run(tmp_path / choice, diagnostics=False, changes={"model.d_model": width})
        text = (folder / "config.yaml").read_text().replace("model: nano", f"model: {choice}")
        (folder / "config.yaml").write_text(text)
        runs.append(read_run(folder))
    assert [g.label for g in group_runs(runs)] == ["standard · model=nano", "standard · model=tiny"]


def test_differences_leave_out_what_only_names_a_run(tmp_path):
    runs = [
        read_run(write_run(tmp_path / "a", seed=1, name="first", diagnostics=False)),
        read_run(write_run(tmp_path / "b", seed=2, name="second", diagnostics=False, changes={"optim.lr": 0.01})),
    ]
    assert config_differences(runs) == {"optim.lr": [0.003, 0.01]}


def test_what_match_solved_does_not_part_a_block_from_its_baseline(tmp_path):
    widths = {"standard": None, "polar": 320}
    groups = group_runs(
        [
            read_run(
                write_run(
                    tmp_path / f"{block}{lr}",
                    block,
                    diagnostics=False,
                    changes={"optim.lr": lr, "model.ffn_width": width, "match": "parameters"},
                )
            )
            for block, width in widths.items()
            for lr in (1e-3, 3e-3)
        ]
    )
    baselines = choose_baselines(groups, None)
    assert [b.label for b in baselines if b] == [g.label for g in groups[:2]] * 2


def test_of_many_varied_settings_a_label_names_only_the_unusual_ones(tmp_path):
    from polarlm.verdict.groups import usual_settings

    variants = [{}, {"block.kernel": "gaussian"}, {"block.nu_t": 4.0}, {"block.radial": "own"}, {"optim.lr": 0.01}]
    runs = [
        read_run(write_run(tmp_path / f"{i}{seed}", "polar", seed=seed, diagnostics=False, changes=changes))
        for i, changes in enumerate(variants)
        for seed in (1, 2)
    ]
    runs.append(read_run(write_run(tmp_path / "s", "standard", diagnostics=False)))
    groups = group_runs(runs)
    words = {"polar", "polar · influence=gaussian", "polar · nu=4", "polar · radial=own", "polar · lr=0.01"}
    assert {g.label for g in groups if g.block == "polar"} == words
    assert [g.label for g in groups if g.block == "standard"] == ["standard · lr=0.003"]
    assert usual_settings(groups)["polar"]["block.influence"] == "student"
    grid = [run for run in runs if run.name[0] in "014" and run.block == "polar"]  # two settings: every label says both
    assert {len(g.label.split(" · ")) for g in group_runs(grid)} == {3}


def test_a_run_from_before_a_setting_has_the_value_it_had_then_and_what_says_nothing_is_not_named(tmp_path):
    kept = {"old-1": {}}
    for name, forgetting in (("off-2", "none"), ("on-1", "content"), ("on-2", "content")):
        kept[name] = {"block.forgetting": forgetting, "block.forget_bias": 0.0}
    runs = [
        read_run(write_run(tmp_path / name, "polar", int(name[-1]), diagnostics=False, changes=changes))
        for name, changes in kept.items()
    ]
    assert [(group.label, group.seeds) for group in group_runs(runs)] == [
        ("polar · forgetting=content", (1, 2)),
        ("polar · forgetting=none", (1, 2)),
    ]


def test_a_number_beyond_float_is_sorted_like_any_other(tmp_path):
    runs = [
        read_run(write_run(tmp_path / str(n), "standard", diagnostics=False, changes={"tokenizer.vocab_size": size}))
        for n, size in enumerate((10**400, 256))
    ]
    assert [g.varied for g in group_runs(runs)] == [{"tokenizer.vocab_size": 256}, {"tokenizer.vocab_size": 10**400}]
