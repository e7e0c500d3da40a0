"""A model is called by a size's name only if it has that size."""

from polarlm.launch.train import size_name
from polarlm.locations import shipped_settings


def test_changed_sizes_lose_the_name_and_other_settings_keep_it():
    nano = shipped_settings("model", "nano")
    assert size_name(nano, "nano") == "nano"
    assert size_name({**nano, "dropout": 0.1, "context": 64}, "nano") == "nano"
    assert size_name({**nano, "d_model": 64}, "nano") == "4x64"
    assert size_name({**nano, "n_layer": 2}, "nano") == "2x128"
    assert size_name({**nano, "ffn_mult": 2.0}, "nano") == "4x128"
