"""toy2.py ADAPT_STEPS: RUN/toy as train.sh leaves it (adapt/model is put there afterwards)."""
import json, shutil, pathlib, sys, copy
T = pathlib.Path("/work/train/toy"); K = pathlib.Path("/work/train/kept/decoder")
shutil.rmtree(T, ignore_errors=True)
def put(stage, config, step, model=None):
    d = T / stage / "checkpoints" / str(step) / "run_config"; d.mkdir(parents=True)
    (d / "metadata").write_text(json.dumps(config))
    if model is not None:
        (T / stage / "model").mkdir(); (T / stage / "model" / "config.json").write_bytes(pathlib.Path(model).read_bytes())
for n in ("clip", "dit", "warmup", "pictures"):
    c = json.loads((K / f"run_config-{n}").read_text()); put(n, c, c["recipe"]["steps"], K / f"config-{n}.json")
c = json.loads((K / "run_config").read_text()); put("decoder", c, c["recipe"]["steps"], K / "model/config.json")
from animegamer_jax.train.registry import find_stage
from animegamer_jax.storage.serialization import to_json
base = json.loads((K / "run_config-dit").read_text())
for n in ("t5", "vae"):
    _, recipe = find_stage("foundations", part=n)
    c = copy.deepcopy(base); c["recipe"] = to_json(recipe); c["model"] = None
    put(n, c, c["recipe"]["steps"])
m = json.loads(sorted(pathlib.Path("w24/mllm1-704").glob("checkpoints/*/run_config/metadata"))[-1].read_text())
m["recipe"].update(steps=4050, naming_weight=0.02); m["recipe"]["optimizer"].update(learning_rate=1.5e-3)
c = copy.deepcopy(m); r = c["recipe"]; r.update(steps=1000, batch_size=64, history_noise=0.0, targets="captions", caption_weight=0.0); r["optimizer"].update(learning_rate=2e-3, warmup_steps=50); c["model"] = None
put("captions", c, 1000)
put("mllm", m, 4050, "w23/adapt/model/config.json")
a = json.loads(sorted(pathlib.Path("w24/adapt6").glob("checkpoints/*/run_config/metadata"), key=lambda p: int(p.parent.parent.name))[-1].read_text())
a["recipe"]["steps"] = int(sys.argv[1])
put("adapt", a, int(sys.argv[1]))
