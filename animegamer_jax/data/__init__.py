"""Data that training reads.

datasets, shards     game datasets and feature datasets on disk, in ArrayRecord files
shared_shards        writes one with all hosts of a run
record_files         reads those files, a bounded number of them open
features             what T5, CLIP and the VAE make of a game dataset
samples, windows     training samples, of single turns and of turns with their history
loader               batches of them on a mesh
characters           characters with names, descriptions and pictures; command: `data features`
publish              a model or a dataset for the hub; command: `publish`
films/               from films to a game dataset
"""
