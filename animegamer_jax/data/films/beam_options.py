"""Options of Beam runners, as the command line gives them."""

from collections.abc import Sequence


def option_values(options: Sequence[str]) -> dict[str, str]:
    """Returns the values of options, each `name=value`, by name."""
    parts = (option.partition("=") for option in options)
    return {name: value for name, _, value in parts}
