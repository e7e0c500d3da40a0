"""Nothing a model writes can move the cursor, colour the screen or hide text."""

from polarlm.printing import visible_text


def test_control_characters_are_shown_and_text_is_left_alone():
    assert visible_text("a\x1b[31mred\x07\x00\x7f") == "a\\x1b[31mred\\x07\\x00\\x7f"
    assert visible_text("right\u202eleft\u200b") == "right\\u202eleft\\u200b"
    assert visible_text("carriage\rreturn") == "carriage\\rreturn"
    kept = "naïve café – 北京 👩‍💻\n\ttab"
    assert visible_text(kept) == kept
