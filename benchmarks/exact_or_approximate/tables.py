"""The tables of the page, from the numbers that were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.exact_or_approximate.experiment import EDGE_METHODS, NODE_METHODS
from benchmarks.exact_or_approximate.picture import short

TITLES = {"atp": "AtP", "atp*": "AtP*", "ig": "IG", "eap": "EAP", "eap-ig": "EAP-IG", "exact": "exact"}
"""The methods as papers name them."""

Numbers = Mapping[str, Any]
Row = tuple[str, Callable[[Numbers], str]]


def titled(method: str) -> str:
    """A method with its steps."""
    steps = {**NODE_METHODS, **EDGE_METHODS}.get(method)
    return TITLES[method] if steps is None else f"{TITLES[method]}, {steps} steps"


def tables(found: Numbers) -> dict[str, str]:
    """Every table of the page, by its name."""
    made = {"tasks": _tasks(found)}
    for task, numbers in found.items():
        made[f"{task}: nodes"] = _table(numbers["nodes"], _NODES)
        made[f"{task}: edges"] = _table(numbers["edges"], _EDGES)
    return made


def said(numbers: Numbers) -> str:
    """What stands above a panel."""
    return f"Spearman {numbers['spearman']:.2f}"


def signed(value: float) -> str:
    """A number with its sign, as it is set."""
    return (f"{value:+.2g}" if abs(value) < 0.1 else f"{value:+.2f}").replace("-", "−")


def _between(key: str) -> Callable[[Numbers], str]:
    def shown(numbers: Numbers) -> str:
        if f"{key}_interval" not in numbers:  # of one prompt
            return f"{numbers[key]:.2f}"
        low, high = numbers[f"{key}_interval"]
        return f"{numbers[key]:.2f} ({low:.2f} to {high:.2f})".replace("-", "−")

    return shown


def _plain(key: str) -> Callable[[Numbers], str]:
    return lambda numbers: f"{numbers[key]:.2f}"


def _found(at: int) -> Callable[[Numbers], str]:
    """How many of the k largest are found."""

    def shown(numbers: Numbers) -> str:
        row = numbers["ranks"][at]
        return f"{round(row['overlap'] * row['k']):,}"

    return shown


def _worst(numbers: Numbers) -> str:
    name, approx, exact = numbers["worst"][0]
    return f"`{short(name)}`: {signed(approx)} for {signed(exact)}"


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %") if value < 0.1 else f"{value:.0%}".replace("%", " %")


def _of_largest(numbers: Numbers) -> str:
    return f"{len(numbers['sign_errors_of_largest']['names']):,}"


_NODES: tuple[Row, ...] = (
    ("pairs", lambda numbers: f"{numbers['pairs']}"),
    ("Pearson", _plain("pearson")),
    ("Pearson without the largest", _plain("pearson_without_largest")),
    ("Spearman (95 % over prompts)", _between("spearman")),
    ("Kendall", _plain("kendall")),
    ("found of the 10 largest", _found(0)),
    ("found of the 30 largest", _found(1)),
    ("wrong sign, of 300", lambda numbers: f"{numbers['sign_errors']}"),
    ("wrong sign, of the 30 largest", _of_largest),
    ("share of its effect that one of the 10 largest is given, median", _plain("size")),
    ("off most, by the method and exactly", _worst),
    ("work, of the exact sweep's", lambda numbers: _percent(numbers["flops_of_exact"])),
)

_EDGES: tuple[Row, ...] = (
    ("Pearson (95 % over edges)", _between("pearson")),
    ("Spearman", _between("spearman")),
    ("Kendall", _plain("kendall")),
    (
        "wrong sign",
        lambda numbers: "{} ({} to {})".format(
            *map(_percent, (numbers["sign_errors"], *numbers["sign_errors_interval"]))
        ),
    ),
    ("found of the 10 largest, at most", _found(0)),
    ("found of the 100 largest, at most", _found(1)),
    ("off most, by the method and exactly", _worst),
)


def _table(by_method: Mapping[str, Numbers], rows: Iterable[Row]) -> str:
    lines = ["| | " + " | ".join(map(titled, by_method)) + " |", "|---|" + "---|" * len(by_method)]
    for label, shown in rows:
        lines.append(f"| {label} | " + " | ".join(shown(one) for one in by_method.values()) + " |")
    return "\n".join(lines)


def _tasks(found: Numbers) -> str:
    """The tasks, with a pair of prompts each, and how well the model does them."""
    lines = [
        "| task | pairs | a clean prompt | corrupted | metric, clean | least | metric, corrupted |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, numbers in found.items():
        one = numbers["behaviour"]
        clean, corrupted = (text.split() for text in one["example"])
        (change,) = [pair for pair in zip(clean, corrupted, strict=True) if pair[0] != pair[1]]
        values = " | ".join(signed(one[key]) for key in ("clean", "clean_least", "corrupted"))
        lines.append(
            f"| {task} | {one['pairs']} | {' '.join(clean)} | {change[0]} → {change[1]} | {values} |"
        )
    return "\n".join(lines)
