"""Released PyTorch checkpoints to bundles and back, and parity with recorded numbers.

command, options    `animegamer convert`, `initialise`, `export`, `parity`
released, initialise   files to the networks of a bundle; parts checks and writes them
export, lora        a bundle to the released files, its updates to a file for diffusers
networks            what both directions share
rules, tables/      which tensor becomes which parameter; sources reads and writes the files
parity              recorded numbers against this code
"""
