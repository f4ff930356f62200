set -e
cd /work/main; export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=/work/jax_cache3
git add -A docs; git commit -qm "Say how the embedded weights were trained" || true
# the commit must be clean for the card
git stash list | head -1
.venv/bin/python scripts/toy/embed.py /work/train/toy --scores out/toy-report 2>&1 | tail -1
.venv/bin/python -c "
from animegamer_jax.bundle.bundle import Bundle
print(Bundle.open('animegamer_jax/assets/toy').digest())"
for n in clip encoder t5 vae tokenizer; do rm -rf animegamer_jax/assets/toy/$n; git checkout -q -- animegamer_jax/assets/toy/$n; done
.venv/bin/python -c "
from animegamer_jax.bundle.bundle import Bundle
b=Bundle.open('animegamer_jax/assets/toy'); print(b.digest())
for n in ('clip','encoder','t5','vae'): b.load(n)
print('loads')"
rm -rf docs/toy-report/report docs/toy-report/report.md; cp -r out/toy-report/report out/toy-report/report.md docs/toy-report/
.venv/bin/python scripts/toy/headline.py out/toy-report
.venv/bin/animegamer openings --model toy 2>&1 | tail -2
rm -rf out/play; make play 2>&1 | tail -3
.venv/bin/python scripts/moving_picture.py out/play docs/images/game.webp
cp out/play/storyboard.png docs/images/storyboard-toy.png
git status --short | cut -c1-60 | head -60; date
