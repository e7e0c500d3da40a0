"""An exported run is the same model in transformers, in a process that has never heard of polarlm.

With POLARLM_OTHER_PYTHON=/path/to/another/venv/bin/python (torch and transformers, no polarlm) that Python does the
loading, and every block in configs/block is exported to it.
"""

import ast
import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from polarlm.attention import StandardAttention
from polarlm.errors import UserError
from polarlm.evaluation.generate import Sampling, sample_tokens
from polarlm.evaluation.metrics import TextSize
from polarlm.evaluation.scores import Text, score_text
from polarlm.model import GPT, GPTConfig
from polarlm.runs.export.bundle import bundle
from polarlm.runs.export.folder import export_run, import_run, model_card
from polarlm.runs.export.llama import is_llama
from polarlm.runs.restore import restore_run
from tests.contract.conftest import BLOCKS as ALL_BLOCKS
from tests.contract.conftest import CLASSES
from tests.runs.made_up_run import made_up_run

pytest.importorskip("transformers")
OTHER_PYTHON = os.environ.get("POLARLM_OTHER_PYTHON")
ADDITIONS = "polar_additions"  # not a yaml: the pieces of recipes
NAMES = ALL_BLOCKS if OTHER_PYTHON else ["standard_qknorm", *CLASSES]
BLOCKS = {name: name != "standard" for name in (*NAMES, ADDITIONS)}  # all but Llama bring code of their own
TOKENS = 19
# Their single precision is itself uncertain by 1e-5 here; in double precision they are held to the same as the others.
ROUGH = ("polar_literal", "polar_irls", "polar_tangent", "polar_paper")
# Run by a Python that cannot import polarlm, in a folder of its own.
STRANGER = """
import copy, json, sys
class NoPolarlm:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "polarlm":
            raise ImportError("polarlm is not installed here")
sys.meta_path.insert(0, NoPolarlm())
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = torch.from_numpy(np.load({tokens!r}))
answers = {{}}
for name, remote in json.loads({blocks!r}).items():
    folder = {folder!r} + "/" + name
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=remote).eval()
    with torch.no_grad():
        np.save(folder + "/logits.npy", model(tokens).logits.numpy())
        loss = model(tokens[:1], labels=tokens[:1]).loss.item()
        np.save(folder + "/double.npy", copy.deepcopy(model).double()(tokens).logits.numpy())
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=256)
    cached = model.generate(tokens[:1, :5], **options)
    plain = model.generate(tokens[:1, :5], use_cache=False, **options)
    beams = model.generate(tokens[:1, :5], num_beams=3, **options)
    again = model.generate(tokens[:1, :5], num_beams=3, use_cache=False, **options)
    words = AutoTokenizer.from_pretrained(folder, trust_remote_code=remote)("a café")["input_ids"]
    answers[name] = dict(kind=type(model).__name__, loss=loss, cached=cached[0].tolist(), plain=plain[0].tolist(),
                         beams=beams[0].tolist() == again[0].tolist(), words=words)
assert not [m for m in sys.modules if m.split(".")[0] == "polarlm"]
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The tokens, and {block: (our run, what the stranger found, its logits in single and double precision)}."""
    root = tmp_path_factory.mktemp("exports")
    tokens = np.random.default_rng(0).integers(256, size=(3, TOKENS))
    np.save(root / "tokens.npy", tokens)
    runs = {block: made_up_run(root / "runs" / block, block, rope_base=777.0) for block in NAMES}
    switches = {"head_gate": True, "value_residual": True, "norm_gain": "channel"}
    sizes = {"ffn": "relu2", "ffn_width": 72, "zero_init": True, "logit_cap": 6.0, "tie_embeddings": False}
    runs[ADDITIONS] = made_up_run(root / "runs" / ADDITIONS, "polar", switches, **sizes)
    for block, remote in BLOCKS.items():
        assert export_run(runs[block], root / "out" / block) is remote
    code = STRANGER.format(
        tokens=str(root / "tokens.npy"), folder=str(root / "out"),
        blocks=json.dumps(BLOCKS),
    )  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "hf"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [OTHER_PYTHON or sys.executable, "-I", "-c", code],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment,
        timeout=3000 if OTHER_PYTHON else 500,  # every block takes a while
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.rpartition("ANSWERS")[2])
    return torch.from_numpy(tokens), {
        block: (runs[block], answers[block], [np.load(root / "out" / block / f"{n}.npy") for n in ("logits", "double")])
        for block in BLOCKS
    }


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_logits_loss_and_generation_are_ours(exported, block):
    tokens, by_block = exported
    run, answer, (logits, double) = by_block[block]
    with torch.no_grad():
        ours = run.model(tokens).numpy()
        exactly = copy.deepcopy(run.model).double()(tokens).numpy()
    assert np.abs(ours).max() > 1
    # Plain formulas there, native ones here, which round differently; transformers' Llama rotates in single precision.
    np.testing.assert_allclose(logits, ours, atol=5e-5 if block in ROUGH else 1e-5)
    np.testing.assert_allclose(double, exactly, atol=1e-10 if BLOCKS[block] else 1e-5)
    text = Text(tokens[0].numpy(), np.array([0]), TextSize(TOKENS, TOKENS, TOKENS, 1))
    assert answer["loss"] == pytest.approx(score_text(run.model, text).nats.mean(), abs=1e-5)
    greedy = list(sample_tokens(run.model, tokens[0, :5].tolist(), 12, Sampling(temperature=0)))
    assert answer["cached"] == answer["plain"] == tokens[0, :5].tolist() + greedy
    assert answer["beams"]
    assert answer["words"] == list("a café".encode())
    assert answer["kind"] == ("PolarlmForCausalLM" if BLOCKS[block] else "LlamaForCausalLM")


@pytest.mark.parametrize("block", ["standard", "polar"])
def test_a_reimported_run_is_the_same_model(tmp_path, block):
    run = made_up_run(tmp_path / "run", block, tie_embeddings=block == "polar", n_kv_head=1)
    export_run(run, tmp_path / "out")
    assert "2.1" in (tmp_path / "out" / "README.md").read_text()
    import_run(tmp_path / "out", tmp_path / "again")
    again = restore_run(tmp_path / "again", "cpu")
    for (name, a), (other, b) in zip(run.model.state_dict().items(), again.model.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    assert again.tokenizer.fingerprint == run.tokenizer.fingerprint
    with pytest.raises(UserError, match="exists"):
        import_run(tmp_path / "out", tmp_path / "again")


def test_an_exported_llama_turns_at_the_runs_own_frequencies(tmp_path):
    run = made_up_run(tmp_path / "run", rope_base=777.0)
    assert export_run(run, tmp_path / "out") is False
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    # The name up to transformers 4 and the one from 5 on.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 777.0
    import_run(tmp_path / "out", tmp_path / "again")
    assert restore_run(tmp_path / "again", "cpu").model.config.rope_base == 777.0


def test_only_a_plain_standard_block_is_a_llama(tmp_path):
    assert is_llama(made_up_run(tmp_path / "a").model)
    assert not is_llama(made_up_run(tmp_path / "b", "standard_rove").model)
    assert not is_llama(made_up_run(tmp_path / "c", "standard_qknorm").model)
    assert not is_llama(made_up_run(tmp_path / "d", ffn="gelu").model)
    assert not is_llama(made_up_run(tmp_path / "e", frame="post").model)
    size, turning = dict(vocab_size=31, context=8, d_model=16, n_layer=1, n_head=2), {"frequencies": "per_head"}
    assert is_llama(GPT(GPTConfig(**size), StandardAttention))
    assert not is_llama(GPT(GPTConfig(**size), partial(StandardAttention, **turning)))
    assert not is_llama(GPT(GPTConfig(**size, frame="pre+tangent"), StandardAttention))


def test_a_folder_of_somebody_else_is_not_overwritten(tmp_path):
    run = made_up_run(tmp_path / "run")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    with pytest.raises(UserError, match="another --out"):
        export_run(run, tmp_path / "precious")
    assert (tmp_path / "precious" / "thesis.tex").exists()


def test_exporting_again_replaces_its_own_files_and_keeps_the_others(tmp_path):
    run, out = made_up_run(tmp_path / "run", "polar"), tmp_path / "out"
    export_run(run, out)
    (out / ".git").mkdir()
    (out / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (out / "notes.md").write_text("mine")
    (out / "README.md").write_text("old")
    export_run(run, out)
    assert (out / "notes.md").read_text() == "mine" and (out / ".git" / "HEAD").exists()
    assert "polar" in (out / "README.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("value", [10**400, -(10**400), "x", None, [], {}, True, float("nan"), "a\n---\nb"])
def test_a_damaged_record_is_left_out_of_the_model_card(tmp_path, value):
    run = made_up_run(tmp_path / "run")
    numbers = ("val/loss", "tokens", "flops_per_token", "seconds")
    (run.folder / "summary.json").write_text(json.dumps(dict.fromkeys(numbers, value)))
    strange = ["no object"] if not isinstance(value, dict) else {"train": {"tokens": value, "bytes": "x"}}
    (run.folder / "corpus.json").write_text(json.dumps({"splits": strange}))
    for choices in (value, {"block": value}):
        card = model_card(replace(run, config={**run.config, "seed": value, "choices": choices}), remote=False)
        assert "seed" not in card.partition("Budget")[2].partition("\n")[0]
        assert "| val |" not in card and card.count("\n---\n") == 1 and "training tokens" not in card


@pytest.mark.parametrize("verb", ["export", "import"])
@pytest.mark.parametrize("moment", ["write_config", "save_weights", "os.rename"])
def test_killed_halfway_nothing_is_there_and_the_same_command_succeeds(tmp_path, monkeypatch, verb, moment):
    run = made_up_run(tmp_path / "run")
    export_run(run, tmp_path / "exported")

    def once():
        export_run(run, tmp_path / "out") if verb == "export" else import_run(tmp_path / "exported", tmp_path / "out")

    def killed(*arguments, **options):
        raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr(f"polarlm.runs.export.folder.{moment}", killed)
        patch.setattr("shutil.rmtree", lambda *a, **k: None)  # a kill -9 cleans nothing up
        patch.setattr(os, "getpid", lambda: 2**22 + 1)  # and its process is gone
        with pytest.raises(SystemExit):
            once()
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".out.*.new"))
    once()
    restored = restore_run(tmp_path / "out", "cpu") if verb == "import" else (tmp_path / "out" / "README.md").exists()
    assert restored and not list(tmp_path.glob(".out.*"))


def test_nothing_behind_a_link_is_exported_or_imported(tmp_path):
    secret = tmp_path / "ssh"
    secret.mkdir()
    (secret / "id_rsa").write_text("SECRET")
    (secret / "auth.json").write_text('{"token": "SECRET"}')
    run = made_up_run(tmp_path / "run")
    (run.folder / "tokenizer" / "keys").symlink_to(secret)
    (run.folder / "tokenizer" / "id").symlink_to(secret / "id_rsa")
    export_run(run, tmp_path / "out")
    (tmp_path / "out" / "polarlm_run" / "tokenizer" / "keys").symlink_to(secret)
    (tmp_path / "out" / "polarlm_run" / "more").symlink_to(secret)
    import_run(tmp_path / "out", tmp_path / "again")
    for folder in (tmp_path / "out", tmp_path / "again"):
        held = [path for path in folder.rglob("*") if not path.is_symlink() and path.is_file()]
        assert held and not [path for path in held if b"SECRET" in path.read_bytes()]
    for folder, act in (
        (run.folder, lambda: export_run(run, tmp_path / "other")),
        (tmp_path / "out" / "polarlm_run", lambda: import_run(tmp_path / "out", tmp_path / "other")),
    ):
        (folder / "environment.json").unlink(missing_ok=True)
        (folder / "environment.json").symlink_to(secret / "auth.json")
        with pytest.raises(UserError, match="is a link"):
            act()
    for place in ("out", "out/polarlm_run"):  # an untrusted run could also lead what is written elsewhere
        (tmp_path / "run2").mkdir(exist_ok=True)
        link = tmp_path / "run2" / place
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(secret)
        with pytest.raises(UserError, match="not written by export"):
            export_run(run, tmp_path / "run2" / "out")
        link.unlink()
    assert sorted(path.name for path in secret.iterdir()) == ["auth.json", "id_rsa"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["polarlm_run/environment.json", "polarlm_run/tokenizer/x", "model.safetensors"])
def test_a_device_in_an_exported_folder_is_not_read(tmp_path, name):
    export_run(made_up_run(tmp_path / "run"), tmp_path / "out")
    (tmp_path / "out" / name).unlink(missing_ok=True)
    (tmp_path / "out" / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match="device"):
        import_run(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_code_of_a_model_is_one_file_without_polarlm(tmp_path):
    export_run(made_up_run(tmp_path / "run", "polar"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.py")] == ["modeling_polarlm.py"]
    tree = ast.parse((tmp_path / "out" / "modeling_polarlm.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [node for node in imports if "polarlm" in ast.unparse(node)]
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(set(names)) == len(names) and "PolarAttention" in names  # no definition hides another


def test_a_name_that_two_modules_define_stays_with_each_of_them(monkeypatch):
    sources = {
        "polarlm.one": "SIZE = 1\n\n\ndef area(SIZE):\n    return SIZE * SIZE\n\n\ndef unused():\n    return 0\n",
        "polarlm.two": "from polarlm.one import area as square\n\nSIZE = 3\n"
        "def cube():\n    return SIZE * square(SIZE)\n",
    }
    monkeypatch.setattr("polarlm.runs.export.bundle._source", sources.__getitem__)
    monkeypatch.setattr("polarlm.runs.export.bundle._is_package", lambda module: False)
    entry = "from polarlm.two import cube\n\n\ndef area():\n    return cube()\n"
    text = bundle("polarlm.entry", entry)
    names = {}
    exec(text, names)
    assert names["area"]() == 27 and "unused" not in text
    with pytest.raises(ValueError, match="imports polarlm as a whole"):
        bundle("polarlm.entry", "import polarlm\n")
