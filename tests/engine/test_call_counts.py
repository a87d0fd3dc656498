"""How much of the package a warm call runs: what the host does before the first token, and in a round."""

from call_counts import count_calls

# Somewhat more than what was counted (942, and 302 in a round of two rows and five drafts): a change that adds to them
# is to be seen.
MOST_BEFORE_FIRST_TOKEN, MOST_IN_A_ROUND = 935, 310


def test_calls_of_a_warm_call():
    found = count_calls([9, 4])
    assert 300 < found.first.total() <= MOST_BEFORE_FIRST_TOKEN
    assert 100 < found.round <= MOST_IN_A_ROUND
