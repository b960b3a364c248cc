"""What every test shares: how Hypothesis searches, and readable assertions in helpers.

`CONEWISE_HYPOTHESIS=thorough make test` searches longer, from a new seed each time.
"""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Tests interrupt commands, also where a shell that ignores SIGINT started this process in its background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The helpers of `tests.laws` assert too: show the values when they fail.
pytest.register_assert_rewrite("tests.laws")

# The time an example takes says how busy the machine is, not whether a law holds: neither
# profile has a deadline, nor the health check that measures seconds.
settings.register_profile(
    "ci",
    max_examples=70,
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough",
    max_examples=5_000,
    stateful_step_count=200,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("CONEWISE_HYPOTHESIS", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Share what tracing a small model of transformers finds."""
    from tests import captures  # noqa: PLC0415  # it imports torch, and some folders need none

    captures.of_test(item)


def pytest_collection_finish() -> None:
    """What the imports made is there to the end: the garbage collector need not look at it each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
