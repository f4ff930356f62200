"""Tries to break the commands by files, requests, kills, full disks; see docs/reliability.md.

python tests/faults/campaign.py [--cases 5000] [--kills 600] [--out out/faults]
python tests/faults/campaign.py --only 1234
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parent, HERE.parents[1]
SUPPORT = TESTS / "support"
sys.path[:0] = [
    *(str(path) for path in (HERE, HERE / "cases", HERE / "mutations", ROOT, SUPPORT)),
    *(str(SUPPORT / name) for name in ("films", "serving", "training")),
    str(ROOT / "scripts"),
]

import sandbox  # noqa: E402


def main(argv: list[str]) -> int:
    """Runs the campaign and prints its table; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000, help="number of mutated files")
    parser.add_argument("--kills", type=int, default=600, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of all choices")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--disks", type=int, default=4, help="operations of each command at which the disk is full"
    )
    parser.add_argument(
        "--buckets", type=int, default=24, help="failures of a bucket's server, of all commands"
    )
    parser.add_argument("--turns", type=int, default=6, help="turns of each player of the crowd")
    parser.add_argument("--requests", type=int, default=3000, help="number of odd requests")
    parts = ["files", "kills", "disks", "buckets", "crowd", "requests"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what is tried")
    parser.add_argument(
        "--kind", default="", help="only files and commands with this in their name"
    )
    parser.add_argument(
        "--only", type=int, help="number of a single case to run again, of one part"
    )
    parser.add_argument("--out", type=Path, default=Path("out/faults"), help="folder to write")
    options = parser.parse_args(argv)
    sandbox.preload()

    from preloading import import_everything

    import_everything()
    from running import run_campaign

    return run_campaign(options)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
