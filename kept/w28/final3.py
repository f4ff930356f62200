"""final2.py BUNDLE OUT SCALE STEPS [five motion values]: a copy of a bundle with the toy's protocol."""
import json, shutil, sys, pathlib
src, out, scale, steps = sys.argv[1:5]
values = [float(v) for v in sys.argv[5:]]
shutil.rmtree(out, ignore_errors=True); shutil.copytree(src, out)
p = pathlib.Path(out) / "config.json"
c = json.loads(p.read_text()); q = c["protocol"]
q.update(denoising_steps=int(steps), history="shown", guidance_scale=float(scale), guidance_schedule="constant", picture_first=True, motion_guidance=1.5)
q.pop("unconditional_motion", None)
if values: q["motion_values"] = values
p.write_text(json.dumps(c, indent=1) + "\n")
