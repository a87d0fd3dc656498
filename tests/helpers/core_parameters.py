"""The mark `core_for`: a parametrised test is `core` for some of its parameters only.

    @pytest.mark.core_for(batch=[3], kind=["eagle3", "mtp"])

marks a test `core` where each of the named parameters has one of the listed values. Several of these marks add up. A
file in which all tests are `core`, except those with a mark of their own, has

    pytestmark = pytest.mark.core_for()
"""

from collections.abc import Sequence

import pytest


def mark_core(items: Sequence[pytest.Item], is_complete: bool) -> None:
    """Add the mark `core` to the items that `core_for` marks for their parameters.

    Args:
        items: the collected tests.
        is_complete: whether `items` has all parameters of the tests in it. Then a value that no test has is an error.
    """
    unused: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for item in items:
        own = [mark for mark in item.own_markers if mark.name == "core_for"]
        for number, mark in enumerate(own or item.iter_markers("core_for")):
            found = item.callspec.params if hasattr(item, "callspec") else {}
            test = (item.nodeid.partition("[")[0], number)
            fits = {(name, repr(one)): found[name] == one for name, ones in mark.kwargs.items() for one in ones}
            unused.setdefault(test, set(fits))
            unused[test] -= {value for value, fit in fits.items() if fit}
            if all(any(found[name] == one for one in ones) for name, ones in mark.kwargs.items()):
                item.add_marker("core")
    wrong = {test: values for (test, _), values in unused.items() if values}
    if is_complete and wrong:
        raise pytest.UsageError(f"core_for names parameters that a test does not have: {wrong}")
