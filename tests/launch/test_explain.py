"""`polarlm explain` and the page of symbols say what the configuration says."""

import pytest

from polarlm.block_keys import PARTS, SYMBOLS, part_choices, part_settings
from polarlm.cli import main
from polarlm.errors import UserError
from polarlm.launch.explain import TEXTS, explanation, symbols_page
from polarlm.locations import CONFIGS


def test_a_symbol_is_explained_with_its_default_range_and_the_parts_that_use_it():
    text = explanation("block.nu")
    for words in ("ν", "degrees of freedom", "3.0 (polar), 4.0 (polar_paper)", "block/influence=student", "(1 + s/"):
        assert words in text
    assert explanation("block.nu_t") == text  # by its old name


def test_a_block_is_the_list_of_its_parts():
    text = explanation("block=polar")
    assert all(part in text for part in PARTS) and all(symbol in text for symbol in SYMBOLS)
    assert "beta       0.1          β  size of the radial step (not used)" in text


@pytest.mark.parametrize("part", PARTS)
def test_every_choice_and_every_setting_of_a_part_has_an_explanation(part):
    assert all(f"  {choice}: " in explanation(f"block/{part}") for choice in part_choices(part))
    for choice in part_choices(part):
        for key in part_settings(part, choice).keys() - {"kind"}:
            text = explanation(f"block.{part}.{key}")
            assert f"block.{part}.{key}: " in text or key == "nu_t"
            assert "allowed" in text and "default" in text


def test_settings_of_other_blocks_are_explained_too():
    assert "block=standard" in explanation("block.qk_gain") and "default   1.0" in explanation("block.qk_gain")


@pytest.mark.parametrize(
    ("typed", "near"), [("block.nuu", "block.nu"), ("block=plar", "polar"), ("block/radal", "radial")]
)
def test_what_does_not_exist_is_refused_with_the_nearest_name(typed, near):
    with pytest.raises(UserError, match=near):
        explanation(typed)


def test_one_thing_is_asked_at_a_time(capsys):
    assert main(["explain"]) == 2 and "explain takes one argument" in capsys.readouterr().err


def test_the_page_of_symbols_is_the_same_text():
    assert (CONFIGS.parent / "docs" / "symbols.md").read_text(encoding="utf-8") == symbols_page()
    assert set(TEXTS) == set(SYMBOLS)
