"""Drafts by suffix: kernels and reference against a search through lists.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

from fractions import Fraction

import pytest
import torch

from hf_specdec.kernels import suffix_drafts, suffix_drafts_reference
from hf_specdec.kernels.types import LONGEST_MATCH, MOST_OCCURRENCES, NO_TOKEN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"reference": suffix_drafts_reference.suffix_drafts, "kernel": suffix_drafts.suffix_drafts}


def occurrences(texts: list[list[int]], text: list[int]) -> list[tuple[int, int, list[int]]]:
    """Of each place after which a token follows: the length of its match, its number, what follows it."""
    found, number = [], 0
    for one in (*texts, text):
        for place in range(len(one) - 1):
            matched = 0
            while matched <= place and matched < min(LONGEST_MATCH, len(text)):
                if one[place - matched] != text[-1 - matched]:
                    break
                matched += 1
            if matched:
                found.append((matched, number + place, one[place + 1 :]))
        number += len(one) + 1
    return sorted(found, reverse=True)[:MOST_OCCURRENCES]


def expected(texts: list[list[int]], text: list[int], num_drafts: int) -> list[int]:
    found, best = occurrences(texts, text), (Fraction(-1), 0, [])
    for match_length in range(1, LONGEST_MATCH + 1):
        going_on = [follows for matched, _, follows in found if matched >= match_length]
        share, score, drafts = Fraction(1), Fraction(0), []
        for number in range(num_drafts):
            total = len(going_on)
            going_on = [one for one in going_on if len(one) > number]
            tokens = [one[number] for one in going_on]
            if not tokens:
                break
            draft = max(tokens, key=tokens.count)  # the first one, of equals
            share *= Fraction(tokens.count(draft), total)
            score += share if number < match_length else 0
            going_on = [one for one in going_on if one[number] == draft]
            drafts.append(draft)
        best = max(best, (score, match_length, drafts))
    return best[2] + [text[-1]] * (num_drafts - len(best[2]))


def rows(texts: list[list[int]], slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as rows of slots, and their lengths; slots after them hold tokens that would be found, too."""
    tokens = torch.stack([torch.tensor((one * (slots // len(one) + 1))[:slots]) for one in texts])
    return tokens.to(DEVICE), torch.tensor([len(one) for one in texts], device=DEVICE)


def joined(texts: list[list[int]]) -> torch.Tensor:
    return torch.tensor([token for one in texts for token in (*one, NO_TOKEN)], dtype=torch.int64, device=DEVICE)


def random_texts(num: int, longest: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Texts in which passages are repeated."""
    generator = torch.Generator().manual_seed(seed)

    def below(number: int) -> int:
        return int(torch.randint(number, (), generator=generator))

    texts = []
    for _ in range(num):
        text = [below(vocabulary)]
        while len(text) < 1 + below(longest):
            start = below(len(text))
            text += text[start : start + 1 + below(12)] if below(2) else [below(vocabulary)]
        texts.append(text)
    return texts


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("vocabulary", "longest", "num_earlier", "num_drafts"),
    [(3, 60, 0, 5), (3, 60, 4, 1), (12, 200, 6, 8), (200, 400, 3, 16), (2, 300, 9, 7)],
)
def test_drafts_are_those_of_a_search(name, vocabulary, longest, num_earlier, num_drafts):
    for seed in range(3):
        earlier = random_texts(num_earlier, longest, vocabulary, seed)
        texts = random_texts(4, longest, vocabulary, seed + 100)
        tokens, lengths = rows(texts, max(map(len, texts)) + 5)
        found = IMPLEMENTATIONS[name](tokens, lengths, joined(earlier), num_drafts).tolist()
        assert found == [expected(earlier, text, num_drafts) for text in texts]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_more_places_than_a_program_has(name):
    """Occurrences of all blocks count, of texts and of the history, the longest matches and the latest first."""
    size = 2 * suffix_drafts.BLOCK.value
    earlier = [[1, 2, 3] + [7] * size, [1, 2, 4, 5]]
    text = [9, 1, 2, 8, 6] + [7] * size + [5, 1, 2]
    tokens, lengths = rows([text, [1, 2], [7, 7]], len(text) + 3)
    found = IMPLEMENTATIONS[name](tokens, lengths, joined(earlier), 3).tolist()
    assert found == [expected(earlier, one, 3) for one in (text, [1, 2], [7, 7])]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rules(name):
    def drafts(text, *earlier, num_drafts=4):
        return IMPLEMENTATIONS[name](*rows([text], len(text) + 2), joined(list(earlier)), num_drafts).tolist()[0]

    assert drafts([4]) == [4] * 4  # nothing to find
    assert drafts([1, 2, 3, 1]) == [2, 3, 1, 1]  # the last token does not match itself, and a text ends
    assert drafts([1, 2, 5, 1, 3, 6, 1]) == [3, 6, 1, 1]  # of equally frequent ones the latest
    assert drafts([1, 2, 5, 1, 2, 5, 1, 3, 6, 8, 1])[0] == 2  # the most frequent one
    assert drafts([9, 1, 3, 9, 9, 1], [1, 2], [8, 1, 2], [1, 2])[0] == 3  # the longest match, if it is as sure
    assert drafts([6, 1], [6, 1, 2, 3], [5, 1, 4]) == [2, 3, 1, 1]  # a text ends where another one begins
