import sys
from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.bundle.config import with_dtypes
from animegamer_jax.toy.world import PROTOCOL
from pathlib import Path
old=Bundle.open('./out/g0/kept/vae'); clip=Bundle.open('./kept/clip/model')
with BundleWriter(sys.argv[1], name='toy', protocol=PROTOCOL, overwrite=True, stages=('foundations-clip','foundations-t5','foundations-vae')) as w:
    for n,b in (('clip',clip),('t5',old),('vae',old)):
        w.write_network(n, getattr(b.config,n), b.read_in_order(n, b.leaves(n)))
    w.write_tokenizer(Path(str(clip.path))/'tokenizer')
