"""The networks of AnimeGamer; channels last everywhere.

mllm.py, mistral.py         The language model: the game's history to the next shot and its states.
dit.py, encoder.py          The decoder: shot representation and motion to a clip's latents.
vae.py, latents.py          Latents to frames and back, by convolution.py.
clip.py, t5.py              Readers of frames and of texts.
linear.py, norms.py, layer_stack.py, kernels/   What they share; attention is `kernels/attend.py`.
"""
