"""What prompt lookup proposes, and that the text is the target's whatever it proposes."""

from __future__ import annotations

import numpy as np
import pytest
from decoding_doubles import TableEngine, script_model, table_model

from trtspec.decoding.cycle import Generation, Request, generate
from trtspec.decoding.draft_target import Target
from trtspec.decoding.ngram import NgramDrafter
from trtspec.decoding.sampling import SamplingParams


def proposed(text, num_draft_tokens=4, **settings):
    generation = Generation(Request(text, 8, num_draft_tokens=num_draft_tokens))
    proposal = NgramDrafter(**settings).propose(generation, num_draft_tokens)
    assert proposal.logits is None
    assert proposal.tokens.dtype == np.int32
    return proposal.tokens.tolist()


@pytest.mark.parametrize(
    ("text", "settings", "tokens"),
    [
        ([7], {}, []),
        ([1, 2, 3, 4], {}, []),
        ([1, 2, 3, 9, 9, 8, 8, 1, 2, 3], {}, [9, 9, 8, 8]),
        ([1, 2, 5, 6, 1, 2, 7, 8, 9, 0, 1, 2], {}, [7, 8, 9, 0]),  # of two matches the most recent
        ([1, 2, 3, 5, 0, 0, 0, 9, 3, 6, 0, 0, 1, 2, 3], {}, [5, 0, 0, 0]),  # a longer match before a more recent one
        ([1, 2, 3, 5, 0, 0, 0, 9, 3, 6, 0, 0, 1, 2, 3], {"max_ngram": 1}, [6, 0, 0, 1]),
        ([1, 2, 3, 5, 0, 0, 0, 9, 3, 6, 0, 0, 1, 2, 3], {"window": 8}, [6, 0, 0, 1]),
        ([1, 2, 3, 5, 0, 0, 0, 9, 3, 6, 0, 0, 1, 2, 3], {"window": 6}, []),
        ([1, 2, 3, 5, 0, 0, 0, 9, 3, 6, 0, 0, 1, 2, 3], {"window": 1}, []),
        ([1, 2, 3, 5, 0, 0, 0, 9, 3, 6, 0, 0, 1, 2, 3], {"window": 100}, [5, 0, 0, 0]),
        ([1, 2, 3, 1], {}, [2, 3, 1, 2]),  # the match is three tokens from the end, so the text repeats after three
        ([5, 5], {}, [5, 5, 5, 5]),
        ([0, 0], {"max_ngram": 16}, [0, 0, 0, 0]),
    ],
)
def test_proposals(text, settings, tokens):
    assert proposed(text, **settings) == tokens


def slow_proposal(text, num_draft_tokens, max_ngram, window):
    """The rule written down once more: longest match first, then the most recent; overlapping copies go on."""
    text = text[-window:] if window else text
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for follower in range(len(text) - 1, n - 1, -1):
            if text[follower - n : follower] == text[-n:]:
                copied = list(text)
                for i in range(num_draft_tokens):
                    copied.append(copied[follower + i])
                return copied[len(text) :]
    return []


def test_proposals_of_random_texts():
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(400):
        text = rng.integers(0, int(rng.integers(2, 12)), int(rng.integers(1, 40))).tolist()
        settings = {"max_ngram": int(rng.integers(1, 6)), "window": [None, 1, 5, 20][rng.integers(4)]}
        tokens = proposed(text, int(rng.integers(1, 7)), **settings)
        assert tokens == slow_proposal(text, len(tokens), **settings)
        assert bool(tokens) == bool(slow_proposal(text, 1, **settings))
        found += bool(tokens)
    assert 200 < found < 400


@pytest.mark.parametrize("settings", [{"max_ngram": 0}, {"window": 0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=r"0 is not at least 1"):
        NgramDrafter(**settings)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(frequency_penalty=0.1)])
def test_greedy_text_is_the_text_without_drafts(sampling):
    """Random models over few ids repeat themselves, so look-ups are often right, and wrong when they leave a loop."""
    drafter = NgramDrafter()  # one for all requests: it keeps nothing of any
    drafted = accepted = 0
    for seed in range(12):
        target = TableEngine(table_model(6, seed, scale=2.0))
        texts = []
        for num_draft_tokens in (0, 3):
            request = Request([1, 4, 1], 40, sampling=sampling, end_ids=(0,), num_draft_tokens=num_draft_tokens)
            *_, last = generate(request, drafter, Target(target))
            texts.append((last.generation.token_ids.tolist(), last.finish_reason))
            drafted += last.generation.acceptance.num_drafted
            accepted += last.generation.acceptance.num_accepted
        assert texts[0] == texts[1]
    assert 0.1 < accepted / drafted < 0.95


def test_a_text_that_repeats_itself_takes_one_pass_for_every_four_tokens():
    target = TableEngine(script_model([1, 2, 3] * 9, 8, prompt_length=6))
    *_, last = generate(Request([1, 2, 3, 1, 2, 3], 24, num_draft_tokens=3), NgramDrafter(), Target(target))
    assert len(target.requests) == 6
    assert last.generation.acceptance.rate == 1.0


def test_without_a_match_the_target_makes_one_token_and_is_asked_again():
    target = TableEngine(script_model([5, 1, 6, 7, 8], 16, prompt_length=2))
    *_, last = generate(Request([1, 2], 4, num_draft_tokens=3), NgramDrafter(), Target(target))
    assert [call.draft_tokens is None for call in target.requests] == [True, True, False, True]
    assert target.requests[2].draft_tokens.tolist() == [2]  # one place is kept for the target's own token
    assert last.generation.token_ids.tolist() == [5, 1, 6, 7]
    assert last.generation.fallbacks == {"draft_empty": 2}
