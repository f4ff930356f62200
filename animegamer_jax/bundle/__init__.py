"""A model on disk.

bundle     opens a bundle and loads its networks
config     content of its config.json
networks   networks that a bundle may hold
writer     writes a bundle, one parameter in memory at a time
arrays     weights of a network as an Orbax checkpoint, streamed; or as safetensors_files
vocabulary   the tokenizer, and the words that a model knows
hub, publishing   models from a hub and to it
embedded   the model that comes with the package
"""
