"""toy.py: lays out RUN/toy as scripts/toy/train.sh would have, from what was kept and what ran here."""
import json, shutil, pathlib, sys, copy
T = pathlib.Path("RUN/toy"); K = pathlib.Path("RUN/kept/decoder"); W = pathlib.Path("RUN")
sys.path.insert(0, "RUN/code20")
from animegamer_jax.train.registry import find_stage
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.bundle.bundle import Bundle
shutil.rmtree(T, ignore_errors=True)
def put(stage, config, step, model=None):
    d = T / stage / "checkpoints" / str(step) / "run_config"; d.mkdir(parents=True)
    config["recipe"]["steps"] = step
    (d / "metadata").write_text(json.dumps(config))
    if model is not None:
        (T / stage / "model").mkdir()
        (T / stage / "model" / "config.json").write_bytes(pathlib.Path(model).read_bytes())
for n in ("clip", "dit", "warmup", "pictures"):
    c = json.loads((K / f"run_config-{n}").read_text()); put(n, c, c["recipe"]["steps"], K / f"config-{n}.json")
c = json.loads((K / "run_config").read_text()); put("decoder", c, c["recipe"]["steps"], K / "model/config.json")
base = json.loads((K / "run_config-dit").read_text())
for n in ("t5", "vae"):
    _, recipe = find_stage("foundations", part=n)
    c = copy.deepcopy(base); c["recipe"] = to_json(recipe); c["model"] = None
    put(n, c, c["recipe"]["steps"])
P, A = (json.loads((W / f"kept/w15/run_config-{n}.json").read_text()) for n in ("adaptp", "adapt"))
_, recipe = find_stage("mllm")
for n, steps, more in (("captions", 1000, dict(batch_size=64, history_noise=0.0, targets="captions")), ("mllm", 3700, dict(batch_size=8, history_noise=0.2))):
    c = copy.deepcopy(P); r = to_json(recipe); r.update(more); c["recipe"] = r; c["model"] = None
    put(n, c, steps, W / "kept/w15/config-mllm.json" if n == "mllm" else None)
put("adapt-pictures", P, 360 + 500 + 300, W / "kept/w15/config-adaptp.json")
put("adapt", A, 1000 + 900 + 400)
shutil.copytree(sys.argv[1], T / "adapt/model")
