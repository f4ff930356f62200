import json, shutil, pathlib, sys, copy
T = pathlib.Path("RUN/toy"); K = pathlib.Path("RUN/kept/decoder")
shutil.rmtree(T, ignore_errors=True)
def put(stage, config, step, model=None):
    d = T / stage / "checkpoints" / str(step) / "run_config"; d.mkdir(parents=True)
    (d / "metadata").write_text(json.dumps(config))
    if model is not None:
        (T / stage / "model").mkdir()
        (T / stage / "model" / "config.json").write_bytes(pathlib.Path(model).read_bytes())
def of(folder):
    found = sorted(pathlib.Path(folder).glob("checkpoints/*/run_config/metadata"), key=lambda p: int(p.parent.parent.name))
    return json.loads(found[-1].read_text())
for n in ("clip", "dit", "warmup", "pictures"):
    c = json.loads((K / f"run_config-{n}").read_text()); put(n, c, c["recipe"]["steps"], K / f"config-{n}.json")
c = json.loads((K / "run_config").read_text()); put("decoder", c, c["recipe"]["steps"], K / "model/config.json")
sys.path.insert(0, "RUN/code20")
from animegamer_jax.train.registry import find_stage
from animegamer_jax.storage.serialization import to_json
base = json.loads((K / "run_config-dit").read_text())
for n in ("t5", "vae"):
    _, recipe = find_stage("foundations", part=n)
    c = copy.deepcopy(base); c["recipe"] = to_json(recipe); c["model"] = None
    put(n, c, c["recipe"]["steps"])
m = of("RUN/w12/mllm")
c = copy.deepcopy(m); r = c["recipe"]; r.update(steps=1000, batch_size=64, history_noise=0.0, targets="captions", captions=0.0); r["optimizer"].update(learning_rate=2e-3, warmup_steps=50); c["model"] = None
put("captions", c, 1000)
put("mllm", m, 2400, "RUN/w12/mllm/model/config.json")
put("adapt-pictures", of("RUN/w12/adaptp"), 360, "RUN/w12/adaptp/model/config.json")
put("adapt", of("RUN/w12/adapt"), 1000)
