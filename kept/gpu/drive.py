"""Runs the training of the toy on one GPU: a graph of commands; packs what is finished."""
import json, os, subprocess, sys, time, shutil
from pathlib import Path

RUN = Path(os.environ.get("RUN", "/tmp/run"))
CODE = Path(os.environ.get("CODE", "/tmp/code"))
PY = os.environ.get("PY", "python3")
AG = [PY, str(CODE / "ag.py")]
TINY = os.environ.get("TINY")
CORES = int(os.environ.get("DRAW", "15"))
MAIN, SIDE = 0, 1
F = str(RUN / "features")


def n(steps):
    return steps if steps == "{D}" else "2" if TINY else str(steps)


def train(stage, model, out, *options, data=F, steps):
    few = ["--steps", n(steps), "--eval-every", "1000000", "--save-every", "1000000", "--log-every", "100",
           "--threads", "6", "--eval-batches", "1"]
    if stage[0] in ("decoder", "adapt"):
        few += ["--eval-clips", "0"]
    return [*AG, "train", *stage, "--data", data, "--model", str(RUN / model / "model"), "--out", str(RUN / out), *few, *options]


D, P = "{D}", int(os.environ.get("PICTURES", 4000))
NO = ("--optimizer.learning-rate", "0", "--optimizer.warmup-steps", "0")
PIC = ("--pictures", "4")
SHOWN = ("--history-shown", "0.7")
SHIFT = ("--timestep-shift", "2")
games = ["--games", "24", "--test-games", "4"] if TINY else ["--games", "2000", "--test-games", "20"]
T = {}
KEEP = ("--save-every", "4000")


def task(name, deps, kind, command, done, **more):
    T[name] = dict(deps=deps, kind=kind, command=command, done=str(RUN / done), **more)


def model(name):
    return f"{name}/model/config.json"


def features(out, *more):
    command = [*AG, "data", "features", "--model", str(RUN / "vae/model"), "--data", str(RUN / "games"), "--out", str(RUN / out), *more]
    name = "f" if out == "features" else "r"
    count = int(os.environ.get("SHARES", 4 if name == "f" else 3))
    for k in range(count):
        task(f"{name}{k}", ["games"], MAIN, command, "never", env={"SHARE": f"{k}/{count}"})
    task(out, [f"{name}{k}" for k in range(count)], MAIN, command, f"{out}/set.json", env={"JAX_PLATFORMS": "cpu"})


task("games", [], MAIN, [*AG, "data", "toyworld", "--out", str(RUN / "games"), *games, "--processes", str(CORES)], "games/set.json", env={"JAX_PLATFORMS": "cpu"})
features("features")
task("dit", ["features"], MAIN, train(["foundations", "--part", "dit"], "vae", "dit", steps=1500), model("dit"))
task("warmup", ["dit"], MAIN, train(["warmup"], "dit", "warmup", steps=400), model("warmup"))
task("pictures", ["warmup"], MAIN, train(["decoder"], "warmup", "pictures", *PIC, steps=P), model("pictures"))
task("decoder", ["pictures"], MAIN, train(["decoder"], "pictures", "decoder", *SHIFT, *KEEP, steps=D), model("decoder"))
task("shown", ["decoder"], MAIN, [*AG, "data", "shown", "--model", str(RUN / "decoder/model"), "--data", F, "--dtype", "bfloat16", "--steps", "4", "--batch", "64"], "features/shown/set.json")
task("mllm", ["shown"], MAIN, train(["mllm"], "decoder", "mllm", *SHOWN, steps=3000), model("mllm"))
task("adapt", ["mllm"], MAIN, train(["adapt"], "mllm", "adapt", *SHOWN, steps=2400), model("adapt"))
task("nowarm-w", ["dit"], SIDE, train(["warmup"], "dit", "nowarm-w", *NO, steps=1), model("nowarm-w"))
task("nowarm-p", ["nowarm-w"], SIDE, train(["decoder"], "nowarm-w", "nowarm-p", *PIC, steps=P), model("nowarm-p"))
task("t2v", ["features"], SIDE, train(["foundations", "--part", "dit"], "vae", "t2v", "--batch-size", "16", steps=int(os.environ.get("T2V", 13000))), model("t2v"))
features("random", "--frame", "random")
R = str(RUN / "random")
task("random-w", ["random", "dit"], SIDE, train(["warmup"], "dit", "random-w", data=R, steps=400), model("random-w"))
task("random-p", ["random-w"], SIDE, train(["decoder"], "random-w", "random-p", *PIC, data=R, steps=P), model("random-p"))
task("nomotion", ["pictures"], SIDE, train(["decoder"], "pictures", "nomotion", "--motion", "none", *SHIFT, *KEEP, steps=D), model("nomotion"))
task("nowarm-d", ["nowarm-p", "pictures"], SIDE, train(["decoder"], "nowarm-p", "nowarm-d", *SHIFT, *KEEP, steps=D), model("nowarm-d"))
task("random-d", ["random-p", "pictures"], SIDE, train(["decoder"], "random-p", "random-d", *SHIFT, *KEEP, data=R, steps=D), model("random-d"))
task("reader", [], SIDE, [PY, "scripts/toy/reader.py", "--out", str(RUN / "reader.safetensors"), "--processes", "7", *(["--clips", "100", "--steps", "2"] if TINY else ["--clips", "24000", "--steps", "10000"])], "reader.safetensors", free=True, nice=15)
task("nopics-m", ["shown"], SIDE, train(["mllm"], "decoder", "nopics-m", *SHOWN, "--history-swap", "1", steps=3000), model("nopics-m"))
task("nopics-a", ["nopics-m"], SIDE, train(["adapt"], "nopics-m", "nopics-a", *SHOWN, steps=2400), model("nopics-a"))
B = ["--against", "torch", "--torch", "eager"]
FULL = ["--model", "middle" if TINY else "full", "--dtype", "bfloat16", "--programs", "mllm", "step", "vae", *B, "--repeats", "5", "--json", str(RUN / "bench-full.json")]
MID = ["--model", "toy" if TINY else "middle", "--dtype", "bfloat16", "--programs", "mllm", "step", "vae", *B, "--repeats", "10", "--json", str(RUN / "bench-middle.json")]
LAST = ["adapt", "nomotion", "nowarm-d", "random-d", "t2v", "nopics-a"]
task("bench-full", LAST, MAIN, [*AG, "bench", *FULL], "bench-full.json", free=True, env={"XLA_FLAGS": ""})
task("bench-middle", [*LAST, "bench-full"], MAIN, [*AG, "bench", *MID], "bench-middle.json", free=True, env={"XLA_FLAGS": ""})


def rate(name):
    rows = [json.loads(x) for x in (RUN / name / "metrics.jsonl").read_text().splitlines()]
    rates = sorted(r["steps_per_second"] for r in rows[-20:] if "steps_per_second" in r)
    return rates[len(rates) // 2] if rates else 1.0


def decoder_steps(now):
    """The number of steps that all decoders are trained for: what fits, chosen once."""
    file = RUN / "D"
    if not file.exists():
        expected = rate("pictures")
        fits = [d for d in (8000, 7000, 6000, 5000) if now + 20 + d / expected <= float(os.environ.get("UNTIL", 560))]
        file.write_text("2" if TINY else str(fits[0] if fits else 5000))
        print("decoder steps", file.read_text(), "at", now, "expected", expected, flush=True)
    return file.read_text()
CAP = int(os.environ.get("CAP", 3))


def run():
    RUN.mkdir(parents=True, exist_ok=True)
    start, running, state = time.time(), {}, {}
    def note():
        (RUN / "state.tmp").write_text(json.dumps(state)); os.replace(RUN / "state.tmp", RUN / "state.json")
    while True:
        for name, (process, began) in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[name]
                t = T[name]
                if code and not t.get("free") and not t.get("again"):
                    t["again"] = True
                    shutil.copy(RUN / f"{name}.log", RUN / f"{name}.first.log")
                    print(name, "failed", code, "again", flush=True)
                    continue
                good = code == 0 and (t["done"].endswith("never") or Path(t["done"]).exists())
                state[name] = {"state": "done" if good else f"failed {code}", "from": began - start, "to": time.time() - start}
                if good and name in PACKED:
                    pack(name)
                note()
        sides = sum(T[x]["kind"] == SIDE and not T[x].get("free") for x in running)
        for name, t in T.items():
            if name in running or name in state:
                continue
            if Path(t["done"]).exists():
                state[name] = {"state": "done", "from": 0, "to": time.time() - start}
                note()
                continue
            if all(state.get(d, {}).get("state") == "done" for d in t["deps"]):
                if t["kind"] == SIDE and not t.get("free"):
                    if sides >= CAP:
                        continue
                    sides += 1
                env = {**os.environ, **t.get("env", {})}
                if t.get("again") or "failed" in state.get("cudnn", {}).get("state", ""):
                    env["NO_CUDNN"] = "1"
                log = open(RUN / f"{name}.log", "w")
                t["command"] = [decoder_steps(time.time() - start) if x == "{D}" else x for x in t["command"]]
                command = (["nice", "-n", str(t.get("nice", 5))] if t["kind"] == SIDE else []) + t["command"]
                running[name] = subprocess.Popen(command, cwd=CODE, env=env, stdout=log, stderr=subprocess.STDOUT), time.time()
        if not running:
            break
        time.sleep(0.2)
    (RUN / "end").write_text("end")


def collect(seconds, out, until):
    """Waits for tasks or the deadline; packs changed networks of finished stages, not packed yet."""
    end = time.time() + seconds
    names = until.split(",")
    while time.time() < end and not (RUN / "end").exists():
        state = json.loads((RUN / "state.json").read_text()) if (RUN / "state.json").exists() else {}
        if any(v["state"].startswith("failed") and T[k]["kind"] == MAIN for k, v in state.items()):
            break
        if all(x in state for x in names):
            break
        time.sleep(0.5)
    wait = time.time() + 25
    while time.time() < wait and list((RUN / "tars").glob("*.tmp")):
        time.sleep(0.3)
    state = json.loads((RUN / "state.json").read_text()) if (RUN / "state.json").exists() else {}
    for name in T:
        s = state.get(name)
        log = RUN / f"{name}.log"
        tail = log.read_text()[-200:].replace("\n", " | ") if log.exists() else ""
        rate = ""
        m = RUN / name / "metrics.jsonl"
        if m.exists():
            rows = [json.loads(x) for x in m.read_text().splitlines()]
            rates = sorted(r["steps_per_second"] for r in rows if "steps_per_second" in r)
            last = {k: round(v, 4) for k, v in rows[-1].items() if isinstance(v, float)}
            rate = f"{rates[len(rates) // 2]:.1f}/s {last}" if rates else ""
        print(name, s and f"{s['state']} {s['from']:.0f}-{s['to']:.0f}", rate[:260], tail if s is None or s["state"] != "done" else "")
    sent = RUN / "sent"
    sent.mkdir(exist_ok=True)
    order = ["decoder", "mllm", "adapt", "nomotion", "nowarm-d", "random-d", "t2v", "nopics-a"]
    files, size = [], 0
    for name in order:
        f = RUN / "tars" / f"{name}.tar.xz"
        if f.exists() and not (sent / name).exists() and size + f.stat().st_size < 58_000_000:
            files.append(f"tars/{f.name}"); size += f.stat().st_size
            (sent / name).write_text("")
    if (RUN / "reader.safetensors").exists() and not (sent / "reader").exists() and state.get("reader", {}).get("state") == "done":
        files.append("reader.safetensors"); (sent / "reader").write_text("")
    print("sent", files, size)
    if files:
        subprocess.run(f"cd {RUN} && tar cf - {' '.join(files)} | split -b 15m -d -a 1 - {out}/models.", shell=True)
    subprocess.run(f"cd {RUN} && tar czf {out}/logs.tgz state.json D *.log bench-*.json */metrics.jsonl */config.json */model/config.json */checkpoints/*/run_config/metadata 2>/dev/null", shell=True)


PACKED = ("decoder", "mllm", "adapt", "t2v", "nomotion", "nowarm-d", "random-d", "nopics-a")


def pack(name):
    (RUN / "tars").mkdir(exist_ok=True)
    tar = RUN / "tars" / f"{name}.tar.xz"
    Path(f"{tar}.tmp").write_text("")
    subprocess.Popen(
        f"{PY} {os.environ.get('PACK', '/tmp/code/drive_pack.py')} {RUN}/{name} {RUN}/pack/{name} && tar c -C {RUN}/pack {name} | xz -2 > {tar}.x && mv {tar}.x {tar}; rm {tar}.tmp",
        shell=True, cwd=CODE, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=open(RUN / f"pack-{name}.log", "w"), stderr=subprocess.STDOUT)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run()
    elif sys.argv[1] == "plan":
        for k, v in T.items():
            print(k, v["deps"], " ".join(v["command"]))
    else:
        collect(float(sys.argv[2]), sys.argv[3], sys.argv[4])
