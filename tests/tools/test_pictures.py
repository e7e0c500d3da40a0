"""No picture of the docs is older than what it shows, and every one can be made again by its command."""

import re

import pytest
from PIL import Image

from tools import pictures

DRAWN = {file: (name, picture) for name, picture in pictures.PICTURES.items() for file in picture.files}


def test_every_picture_of_the_docs_is_made_by_a_command():
    committed = {str(path.relative_to(pictures.DOCS)) for path in pictures.DOCS.rglob("*.png")}
    assert committed == set(DRAWN)


@pytest.mark.parametrize("file", DRAWN)
def test_a_picture_is_not_older_than_what_it_shows(file):
    name, picture = DRAWN[file]
    said = Image.open(pictures.DOCS / file).text
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", said["Date"]) and said["Command"] == f"python -m tools.pictures {name}"
    expected = f"{pictures.source_hash(picture.sources)} {' '.join(picture.sources)}"
    assert said["Sources"] == expected, f"docs/{file} is older than what it shows: run {said['Command']}"


def test_a_changed_source_makes_a_picture_old(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    (tmp_path / "rows.json").write_text("1")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    pictures.stamp(tmp_path / "a.png", "make it", ("rows.json",))
    before = Image.open(tmp_path / "a.png").text["Sources"]
    assert before.startswith(pictures.source_hash(("rows.json",)))
    (tmp_path / "rows.json").write_text("2")
    assert not before.startswith(pictures.source_hash(("rows.json",)))
