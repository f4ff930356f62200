"""final.py BUNDLE OUT STEPS [five motion values]: a copy of a bundle with the toy's protocol, steps, values."""
import json, shutil, sys, pathlib
src, out, steps = sys.argv[1:4]
values = [float(v) for v in sys.argv[4:]]
shutil.rmtree(out, ignore_errors=True); shutil.copytree(src, out)
p = pathlib.Path(out) / "config.json"
c = json.loads(p.read_text())
c["protocol"].update(denoising_steps=int(steps), history="shown", guidance_scale=1.5, guidance_schedule="constant", unconditional_motion=0.6)
if values: c["protocol"]["motion_values"] = values
p.write_text(json.dumps(c, indent=1) + "\n")
