import sys

from animegamer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
