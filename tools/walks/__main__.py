"""Count the files on the paths of a checkout: `python -m tools.walks [CHECKOUT]` prints them as
JSON. `--write before` or `--write now` stores them in docs/house_paths.json, from which
`make house` makes a table of docs/house.md. It takes two minutes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.walks.record import paths
from tools.walks.tables import STORED, stored

REPO = Path(__file__).parents[2]


def main() -> None:
    """Print or store the files of one checkout."""
    parser = argparse.ArgumentParser(prog="python -m tools.walks", description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=REPO)
    parser.add_argument("--write", choices=["before", "now"], help="store them as these")
    options = parser.parse_args()
    recorded = paths(options.checkout)
    if options.write is None:
        print(json.dumps(recorded, indent=1))
        return
    everything = stored() if STORED.exists() else {}
    everything[options.write] = recorded
    STORED.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
