"""Chi-square test of generated texts against the distribution of a model."""

import torch


def p_value(counts, law):
    """Chi-square test of `counts` against `law`, both flat; cells that expect less than 5 are pooled."""
    expected = law.double() * counts.sum()
    assert (counts[law == 0] == 0).all(), "a token of probability 0 was drawn"
    small = expected < 5
    observed = torch.cat([counts[~small].double(), counts[small].sum().double()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2).item()


class Cells:
    """Texts after a prompt, sorted into cells that are likely enough to be counted.

    A cell is a likely prefix, down to whole texts, and holds the texts without a longer likely prefix. So vocabularies
    with too many texts to enumerate work, too.

    Args:
        model: generates the texts.
        prompt: `[1, P]` int64.
        length: tokens of a text.
        least: least probability of a likely prefix.

    Attributes:
        law: `[cells]` float64, their probabilities.
    """

    @torch.no_grad()
    def __init__(self, model, prompt, length, least):
        self._cells = {(): 0}
        law, beginnings, device = [1.0], [()], prompt.device
        for _ in range(length):
            longer = []
            for start in range(0, len(beginnings), 256):
                some = beginnings[start : start + 256]
                texts = torch.cat([prompt.expand(len(some), -1), torch.tensor(some, device=device).long()], dim=1)
                before = torch.tensor([law[self._cells[text]] for text in some], dtype=torch.float64, device=device)
                joint = before[:, None] * model(texts, logits_to_keep=1).logits[:, 0].double().softmax(dim=-1)
                rows, tokens = (joint >= least).nonzero(as_tuple=True)
                for row, token, share in zip(rows.tolist(), tokens.tolist(), joint[rows, tokens].tolist(), strict=True):
                    law[self._cells[some[row]]] -= share
                    longer.append((*some[row], token))
                    self._cells[longer[-1]] = len(law)
                    law.append(share)
            beginnings = longer
        self.law = torch.tensor(law, dtype=torch.float64).clamp(min=0.0)

    def count(self, texts):
        """`[cells]` int64: how many of the texts `[N, length]` are in each."""
        found = []
        for text in map(tuple, texts.tolist()):
            found.append(next(self._cells[text[:end]] for end in range(len(text), -1, -1) if text[:end] in self._cells))
        return torch.tensor(found).bincount(minlength=len(self.law))
