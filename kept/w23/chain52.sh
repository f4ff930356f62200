cd /work/train
while [ ! -e w23/pics/model/config.json ]; do sleep 5; done; sleep 20
JAX_PLATFORMS=cpu PYTHONPATH=/work/train/code25 /work/main/.venv/bin/python soup2.py w23/pics/model w21/mllm6/model 0.5 w23/soup
PDRAWS=1 CLIPS=8 SHARE=0.5 CSHIFT=2 AUG=0.1 bash chain51.sh fit7.py reps6 1100 w23/soup w23/adapt 8
