"""Two hundred wrong inputs: exit code 2, one sentence, nothing written, and no waiting for torch."""

import importlib.util
import json

import pytest

from polarlm.errors import UserError
from polarlm.launch.overrides import config_loader, plan_jobs
from polarlm.training.loggers import check_targets
from tests.launch.forked import Fork

# key: values that must be refused, as typed.
WRONG_VALUES = {
    "seed": f"-1 1.5 one null true [1] {2**63} 1{'0' * 400} 1{'0' * 5000} 1e400",
    "name": "a/b .. . '' [a] true {a:1} ../x",
    "group": f"[a] true '' ../x a/b .. . /tmp/x {'g' * 129}",
    "resume": "maybe true null 1 Auto",
    "runs_dir": "null '' 3 [a]",
    "cache_dir": "null '' true",
    "jobs.stop_on_failure": "maybe null 1",
    "jobs.retries": "-1 x 1.5",
    "sample.prompt": "null [a] 3",
    "sample.tokens": "-1 1.5 many null true 1e15",
    "sample.temperature": "-0.1 hot null nan inf 1e-320 1e-9",
    "sample.top_k": "0 -3 2.5 few",
    "trainer.max_steps": "1.5 0 -1 many true [3] nan 1e18 1e30",
    "trainer.max_tokens": "0 -5 1.5 inf lots 1e300",
    "trainer.batch_tokens": "0 -128 null big 128.5 1000 1e15 4294967296",
    "trainer.micro_batch_tokens": "0 null -1 x 1e15",
    "trainer.log_every": f"0 -1 null often 2.5 {2**63}",
    "trainer.val_every": "0 -1 null",
    "trainer.checkpoint_every": "0 -1 null 1.5",
    "trainer.keep_checkpoints": "0 null 1.5",
    "trainer.on_nonfinite": "ignore null",
    "trainer.max_incidents": "-1 null x",
    "trainer.spike_z": "-1 null x",
    "trainer.devices": "0 -1 two null 1.5 [0] 1e6",
    "trainer.nodes": "0 -2 null 1e9",
    "trainer.accelerator": "gpuu null 1 true toaster",
    "trainer.precision": "fp7 32 bf16 null true",
    "trainer.strategy": "dpp null true fsdp2",
    "trainer.compile": "maybe null 1 yess",
    "trainer.deterministic": "maybe null 1",
    "optim.lr": "0 -1e-3 fast null nan inf true 1e-320",
    "optim._target_": "os.system ''",
    "optim.weight_decay": "-1 null heavy inf 1e30 1e6",
    "optim.eps": "0 -1e-8 null 1e-320 1e30",
    "optim.betas": "[0.9] 0.9 null [0.9,1.0] [0.9,-0.1] [0.9,x] [0.9,0.95,0.99]",
    "optim.estimator_lr_factor": "-1 null x",
    "optim.grad_clip": "0 -1 x true",
    "schedule.warmup_fraction": "-0.1 1.5 null x",
    "schedule.warmup_tokens": f"-1 1.5 x 1{'0' * 400} 1e300",
    "schedule.final_factor": "-3 2 null x",
    "logger.wandb.mode": "sometimes null true",
    "logger.wandb.project": "null a/b ''",
    "logger.wandb.save_dir": "'\0'",
    "diagnostics.every": "-1 null 1.5",
    "diagnostics.tokens": "0 -1 null 1e15",
    "diagnostics.length": "0 null x 1e15",
    "model.d_model": "0 -8 null x 1.5 130",
    "model.n_layer": "0 -1 null 2.5 4096",
    "model.n_head": "0 5 null x",
    "model.n_kv_head": "0 3 x 2.5",
    "model.head_dim": "0 3 x",
    "model.context": "0 -1 null x",
    "model.ffn": "relu null 3 swigluu",
    "model.ffn_mult": "0 -1 null x 1e-9 1e9",
    "model.ffn_width": "0 -1 x 1e12 16777216",
    "model.logit_cap": "0 -1 x 1e-30 1e30 1e-320",
    "model.dropout": "-0.1 1 x null",
    "model.tie_embeddings": "maybe null 1",
    "model.rope_base": "0 -1 null 1e300",
    "model.norm_eps": "0 null 1e-320 1e30",
    "model.checkpointing": "maybe null",
    "data.eval_tokens": "-1 0 1.5 x",
    "data.packing": "tight null true",
    "data.mask_documents": "maybe null",
    "data.append_eos": "perhaps 1",
    "data.newlines": "crlf null",
    "data.errors": "loud",
    "data.max_bytes": "0 -1 x 1.5 40 128",
    "data.split.rule": "random null",
    "data.split.val": "-0.1 1 x 0",
    "data.split.test": "1.5 -1",
    "data.source": "disk",
    "data.name": "../x '' a/b",
    "data.streaming": "maybe",
    "data.stream_head_bytes": "0 -1",
    "data.document_start": "'['",
    "tokenizer.vocab_size": "0 -5 x null 1.5",
    "tokenizer.min_frequency": "0 -1 x",
    "tokenizer.kind": "bpp",
    "tokenizer.special_tokens": "x [1]",
    "tokenizer.train_bytes": "0 x",
}
WRONG_BLOCK_VALUES = {
    "block.influence.irls_steps": "0 1.5 x 1000000",
    "block.tie_output": f"1{'0' * 400} 10**400 1e400 2 maybe",  # an old name
    "block/influence": "studnt null 3",
    "block.step.projection": "globall true",
    "block.inputs.norm_position": "middle",
    "block.inputs.norm_scope": "both",
    "block.influence": "x null",
    "block.inputs.lift": "3 0 x",
    "block.backend": "cuda",
    "block.transport.rotate_values": "maybe 1",
    "block/inputs": "perhaps",
    "block.precision.mu_spread": "wide",
    "block.nu": "0 -1 x [1,-2] null inf [] [1,2,3]",
    "block._target_": "os.system ''",
    "block.precision.sigma_t0": "-1 x",
    "block.eta": "-0.1 x",
    "block.m_inf": "-1 null",
    "block.mu": "-0.5 null",
    "block.inputs.radius": "0 -1",
    "block.alpha": "-1 x",
    "block.beta": "-1 0.3",  # which needs a radial channel
    "block.frozen": "alpha [1]",
}
OTHERS = [
    (["block=plar"], "polar"),
    (["block=polar,standard"], "-m"),
    (["model=nanno"], "nano"),
    (["data=wikitext3"], "wikitext2"),
    (["tokenizer=bpee"], "bpe"),
    (["optim=adam"], "adamw"),
    (["schedule=cosin"], "cosine"),
    (["trainer=gpuu"], "gpu"),
    (["logger=wanb"], "wandb"),
    (["diagnostics=of"], "off"),
    (["experiment=nonexistent"], "experiment"),
    (["sweep=nuu"], "nu"),
    (["hydra/launcher=nowhere"], "basic"),
    (["block=standard", "block.nu=3"], "block.nu"),
    (["block=xpos", "block.scale=1e-300"], "block.scale"),
    (["block=xpos", "block.scale=1", "model.context=128"], "block.scale"),
    (["block=rfa_published", "block.damping=1e30"], "block.damping"),
    (["block=rfa_published", "block.process_floor=-1"], "block.process_floor"),
    (["block=rfa_published", "block.inverse_temperature=0"], "block.inverse_temperature"),
    (["trainer.max_step=3"], "trainer.max_steps"),
    (["max_steps=3"], "trainer.max_steps"),
    (["+trainer.foo=3"], "trainer.foo"),
    (["+logger.wandb.api_key=secret"], "logger.wandb.api_key"),
    (["logger.mode=offline"], "logger.wandb.mode"),
    (["logger=[wandb,csw]"], "csv"),
    (["callbacks=early_stoping"], "early_stopping"),
    (["+model.vocab_size=3"], "tokenizer"),
    (["+block.foo=3"], "block.foo"),
    (["+data.note=x"], "data.note"),
    (["+optim.momentum=0.9"], "optim.momentum"),
    (["+seed=3"], "without the +"),
    (["~seed"], "~seed"),
    (["~optim"], "optim"),
    (["~trainer.max_steps"], "trainer.max_steps"),
    (["polar"], "key=value"),
    (["--multrun"], "--multirun"),
    (["--seed", "3"], "--seed"),
    (["--cfg", "everything"], "--hydra-help"),
    (["optim.lr=[1"], "optim.lr"),
    (["name=${nothing}"], "name"),
    (["seed=${oc.env:NO_SUCH_VARIABLE}"], "seed"),
    (["trainer=3"], "trainer"),
    (["trainer.max_steps=null", "trainer.max_tokens=null"], "trainer.max_steps"),
    (["schedule=wsd", "schedule.decay_fraction=0.99", "schedule.warmup_fraction=0.5"], "decay"),
    (["schedule.warmup_tokens=1e12"], "warm-up"),
    (["data.split.val=0.6", "data.split.test=0.6"], "data.split"),
    (["data=text"], "data.path"),
    (["data=text", "data.path=nowhere.txt"], "does not exist"),
    (["data=text", "data.path='~nobody_here/x.txt'"], "does not exist"),
    (["tokenizer=file", "tokenizer.path='~nobody_here/x'"], "no tokenizer.json"),
    (["model.d_model=30", "model.n_head=2"], "odd"),
    (["model.d_model=131072"], "memory"),
    (["model.head_dim=131072"], "memory"),
    (["optim.lr=1", "optim.weight_decay=2"], "optim.weight_decay"),
    (["data=mixture"], "data.parts"),
    (["data=mixture", "+data@data.parts.code=pydocs"], "data.weights"),
    (["data=mixture", "data.parts={}"], "data.parts"),
    (["data=mixture", "data.parts=null"], "data.parts"),
    (["data=text", "data.path=/proc/kmsg"], "/proc/kmsg"),
    (["tokenizer=file", "tokenizer.path=/proc/kmsg"], "/proc/kmsg"),
    (["init_from=/proc/self/mem"], "init_from"),
    (["init_from=/"], "init_from"),
    (["init_from=nowhere"], "init_from"),
    ([f"init_from={'a' * 5000}"], "init_from"),
    (["data=hub", "data.hub.name=../../etc"], "data.hub.name"),
    (["data=text", "data.path=/proc/self/mem"], "/proc/self/mem"),
    (["data=text", f"data.path={'a' * 5000}"], "too long"),
    (["data=text", f"data.path={'a' * 300}/b.txt"], "too long"),
    (["--resolve"], "--cfg"),
    (["--experimental-rerun", "x.pickle"], "pickle"),
    (["trainer.devices=3"], "trainer.batch_tokens"),
    (["trainer=fsdp", "trainer.precision=16-mixed"], "bf16-mixed"),
    (["-m", "seed=x,y"], "seed"),
    (["-m", "block=polar,plar"], "plar"),
    (["-m", "optim.lr=interval(0,1)"], "interval"),
    (["-m", "seed=range(1,1)"], "seed=range(1,1) has no value"),
    (["-m", "block=glob(zzz*)"], "block=glob(zzz*) has no value"),
    (["-m", "seed=1,2", "hydra.sweeper.max_batch_size=-1"], "hydra.sweeper.max_batch_size=-1 must be"),
    (["-m", "seed=1,2", "hydra.sweeper.max_batch_size=0"], "hydra.sweeper.max_batch_size=0 must be"),
    (["-m", "seed=range(1000)", "trainer.max_steps=range(1,1000)"], "more than 100,000 jobs"),
    (["-m", "seed=glob(*)"], "seed"),
]
EVAL = [
    ([], "checkpoint"),
    (["checkpoint=null"], "checkpoint"),
    (["checkpoint=x", "data=txet"], "text"),
    (["checkpoint=.", "data=text"], "data.path"),
    (["checkpoint=.", "data=text", "data.path=nowhere.txt"], "does not exist"),
    (["checkpoint=x", "split=valid"], "val"),
    (["checkpoint=x", "device=tpu"], "device"),
    (["chekpoint=x"], "checkpoint"),
    (["checkpoint=x", "cache_dir=null"], "cache_dir"),
    (["checkpoint=x", "sed=1"], "seed"),
]
COMPARE = [
    "--margin=nan",
    "--margin=1e400",
    "--margin=0",
    "--published=nan --metric=val/loss",
    "--seeds=1",
    "--watch=0",
]
CASES = [(["train.py", f"{key}={value}"], key) for key, text in WRONG_VALUES.items() for value in text.split()]
CASES += [
    (["train.py", "block=polar", f"{key}={value}"], key)
    for key, text in WRONG_BLOCK_VALUES.items()
    for value in text.split()
]
CASES += [(["train.py", *arguments], word) for arguments, word in OTHERS]
CASES += [(["eval.py", *arguments], word) for arguments, word in EVAL]
CASES += [(["polarlm", "compare", "runs", *text.split()], text.partition("=")[0]) for text in COMPARE]


@pytest.fixture(scope="module")
def fork():
    parent = Fork()
    yield parent
    parent.close()


def test_there_are_many():
    assert len(CASES) >= 200


@pytest.mark.parametrize(("command", "word"), CASES, ids=[" ".join(command) for command, _ in CASES])
def test_a_wrong_input_is_one_sentence_and_exit_code_2(fork, tmp_path, command, word):
    done = fork.run(tmp_path, *command)
    assert done.code == 2, done.out
    lines = done.out.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.out
    assert word in lines[0]
    assert list(tmp_path.iterdir()) == []
    assert done.heavy == []
    assert done.seconds < 2


@pytest.mark.parametrize("tokenizer", ["byte", "char", "word"])
@pytest.mark.parametrize("text", ["hello\n", "a b " * 20, "x" * 131, "one\n" * 9])
def test_a_text_shorter_than_a_context_is_refused_before_torch(fork, tmp_path, text, tokenizer):
    (tmp_path / "short.txt").write_text(text)
    done = fork.run(tmp_path, "train.py", "data=text", "data.path=short.txt", f"tokenizer={tokenizer}")
    assert done.code == 2 and done.heavy == [], done.out
    assert len(done.out.strip().splitlines()) == 1 and "model.context=128" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_a_tokenizer_with_duplicate_ids_is_refused_before_torch(fork, tmp_path):
    vocabulary = {chr(97 + number): number // 2 for number in range(26)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    done = fork.run(tmp_path, "train.py", "tokenizer=file", "tokenizer.path=tokenizer.json")
    assert done.code == 2 and done.heavy == [], done.out
    assert len(done.out.strip().splitlines()) == 1 and "one id to several tokens" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["trackio", "mlflow", "tensorboard"])
def test_a_logger_that_is_not_installed_is_refused_before_torch(fork, tmp_path, name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    done = fork.run(tmp_path, "train.py", f"logger={name}")
    assert done.code == 2 and done.heavy == [], done.out
    assert f"pip install 'polarlm[{name}]'" in done.out and list(tmp_path.iterdir()) == []


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_written(monkeypatch):
    config = plan_jobs(config_loader(), "train", ["logger=trackio"], multirun=False).jobs[0].config
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'polarlm\[trackio\]'"):
        check_targets(config)


def test_a_right_input_would_have_got_further(fork, tmp_path):
    done = fork.run(tmp_path, "train.py", "--cfg", "job", "trainer.max_steps=2e3", "block=polar", "block.nu=[1,2,3,4]")
    assert done.code == 0 and "max_steps: 2000" in done.out and "Traceback" not in done.out
