"""`python -m experiments NAME [--smoke] [--out FILE]`."""

import argparse
from pathlib import Path

from experiments import accuracy, error_by_order

EXPERIMENTS = {"accuracy": accuracy, "error-by-order": error_by_order}


def main() -> None:
    """Run one experiment, write its JSON and print it."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument(
        "--smoke", action="store_true", help="a run of seconds, to see that it works"
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    experiment = EXPERIMENTS[arguments.name]
    experiment.show(experiment.run(out=arguments.out, smoke=arguments.smoke))


if __name__ == "__main__":
    main()
