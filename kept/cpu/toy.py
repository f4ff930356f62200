"""toy.py BUNDLE: lays out RUN/toy as scripts/toy/train.sh would have, from what was kept."""
import copy, json, pathlib, shutil, sys
R = pathlib.Path("RUN"); T, K = R / "toy", R / "kept"
sys.path.insert(0, "BRANCH")
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.train.registry import find_stage
shutil.rmtree(T, ignore_errors=True)
def put(stage, config, step, model=None):
    d = T / stage / "checkpoints" / str(step) / "run_config"; d.mkdir(parents=True)
    config["recipe"]["steps"] = step
    (d / "metadata").write_text(json.dumps(config))
    if model is not None:
        (T / stage / "model").mkdir()
        (T / stage / "model" / "config.json").write_bytes(pathlib.Path(model).read_bytes())
D = K / "decoder"
for n in ("clip", "dit", "warmup", "pictures"):
    c = json.loads((D / f"run_config-{n}").read_text()); put(n, c, c["recipe"]["steps"], D / f"config-{n}.json")
c = json.loads((D / "run_config").read_text()); put("decoder", c, c["recipe"]["steps"], D / "model/config.json")
base = json.loads((D / "run_config-dit").read_text())
for n in ("t5", "vae"):
    _, recipe = find_stage("foundations", part=n)
    c = copy.deepcopy(base); c["recipe"] = to_json(recipe); c["model"] = None
    put(n, c, c["recipe"]["steps"])
P = json.loads((K / "w15/run_config-adaptp.json").read_text())
A = json.loads((K / "w17/run_config-adapt.json").read_text())
_, recipe = find_stage("mllm")
for n, steps, more in (("captions", 1000, dict(batch_size=64, history_noise=0.0, targets="captions")), ("mllm", 3700, dict(batch_size=8, history_noise=0.2))):
    c = copy.deepcopy(P); r = to_json(recipe); r.update(more); c["recipe"] = r; c["model"] = None
    put(n, c, steps, K / "w17/config-mllm.json" if n == "mllm" else None)
A["recipe"]["first_pictures"] = 4
put("adapt", A, 700 + 750)
shutil.copytree(sys.argv[1], T / "adapt/model")
