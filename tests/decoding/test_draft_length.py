"""Draft lengths by load and acceptance: against the best fixed length in a simulation, and exactly as the target.

The simulated requests accept each draft token with a known probability, and their cycles take a known time with noise:
the best fixed length is known too. All seeds are fixed.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from decoding_doubles import TableEngine, distance, exact_law, table_model

from trtspec.decoding.cycle import Request, generate
from trtspec.decoding.draft_length import DraftLength
from trtspec.decoding.draft_target import DraftModel, Target
from trtspec.decoding.sampling import SamplingParams
from trtspec.decoding.verify import NO_PROPOSAL, Proposal

MOST = 8
PLAIN_S = 0.02


class Load:
    """Requests of 128 tokens, one after the other; each draft token costs `cost` plain passes and is accepted with
    probability `rate` when those before it were."""

    def __init__(self, policy, *, in_flight=1, noise=0.2, seed=0):
        self.policy, self.in_flight, self.noise = policy, in_flight, noise
        self.random = random.Random(seed)
        self.lengths = []
        self.now_s = 0.0
        self._begin()

    def _begin(self):
        self.running, self.left = self.policy.running(), 128

    def serve(self, num_cycles, rate, cost, plain_s=PLAIN_S, stall=lambda cycle: 1.0):
        """Emitted tokens per time of a plain pass."""
        emitted, spent_s = 0, 0.0
        for cycle in range(num_cycles):
            room = min(MOST, self.left - 1)
            length = self.policy.choose(self.in_flight, self.running, room)
            assert 0 <= length <= room
            accepted = 0
            while accepted < length and self.random.random() < rate:
                accepted += 1
            seconds = plain_s * (1 + length * cost)
            emitted, spent_s = emitted + accepted + 1, spent_s + seconds
            self.running.update(length, accepted)
            noisy = seconds * max(self.random.gauss(1, self.noise), 0.01) * stall(cycle)
            for _ in range(self.in_flight):  # the others, in the same pass
                self.policy.observe(self.in_flight, length, self.now_s, self.now_s + noisy)
            self.now_s += noisy
            if room:
                self.lengths.append(length)
            self.left -= accepted + 1
            if self.left <= 0:
                self._begin()
        return emitted / spent_s * plain_s


def best_fixed(rate, cost):
    """Length and emitted tokens per time of a plain pass, at most `MOST` tokens; ends of requests left out."""
    emitted = accumulate(rate**position for position in range(MOST + 1))
    speeds = [tokens / (1 + length * cost) for length, tokens in enumerate(emitted)]
    return int(np.argmax(speeds)), max(speeds)


def adaptive(**settings):
    return DraftLength("adaptive", MOST, **settings)


RATES, COSTS = (0.2, 0.5, 0.8), (0.03, 0.1, 0.3, 0.6, 1.1)


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "given"])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rate", RATES)
def test_adaptive_is_as_fast_as_the_best_fixed_length(rate, cost, measured):
    """At least 97 % over 8,000 cycles, what is spent on finding out and the ends of answers included; 20 % noise."""
    load = Load(adaptive(token_cost=None if measured else {1: cost}))
    length, speed = best_fixed(rate, cost)
    assert load.serve(8000, rate, cost) >= 0.97 * speed
    assert np.mean(load.lengths[1000:]) == pytest.approx(length, abs=0.35 * length + 0.2)


def test_plain_decoding_wins_from_where_a_token_costs_more_than_it_brings():
    """A first draft token brings `rate` tokens and costs `cost` passes, so the lengths cross to 0 where they meet."""
    medians = [np.median(_lengths(cost)) for cost in (0.3, 0.45, 0.8)]
    assert medians[0] >= 1 <= medians[1]
    assert medians[2] == 0


def _lengths(cost):
    load = Load(adaptive())
    load.serve(3000, 0.6, cost)
    return load.lengths[1000:]


CHANGES = {
    "drafts become good": ((0.2, 0.3, 1), (0.8, 0.3, 1)),
    "drafts become bad": ((0.8, 0.3, 1), (0.2, 0.3, 1)),
    "drafts become dear": ((0.6, 0.1, 1), (0.6, 1.1, 1)),
    "drafts become cheap": ((0.6, 1.1, 1), (0.6, 0.1, 1)),
    "all becomes slow": ((0.6, 0.1, 1), (0.6, 0.1, 3)),
    "all becomes fast": ((0.6, 0.1, 3), (0.6, 0.1, 1)),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("seed", range(3))
def test_adaptive_recovers_when_costs_or_acceptance_change(before, after, seed):
    """1,500 cycles after the change it is within 5 % of the best fixed length for what is true now (2,000 cycles)."""
    load = Load(adaptive(), seed=seed)
    for (rate, cost, scale), cycles in ((before, 3000), (after, 1500)):
        load.serve(cycles, rate, cost, scale * PLAIN_S)
    rate, cost, scale = after
    assert load.serve(2000, rate, cost, scale * PLAIN_S) * scale >= 0.95 * scale * best_fixed(rate, cost)[1]


def test_plain_decoding_is_left_again_where_drafts_become_good():
    """With costs that are given, short drafts now and then are all that can show it."""
    load = Load(adaptive(token_cost={1: 0.5}))
    load.serve(3000, 0.1, 0.5)
    assert np.mean(np.array(load.lengths[-1000:]) > 0) < 0.03
    load.serve(3000, 0.9, 0.5)
    assert np.median(load.lengths[-1000:]) >= 1


def test_drafts_that_are_accepted_are_followed_up_within_bounds():
    """Drafts that never pay: six trials at once, seven more if all are accepted, and then one in 64 cycles."""
    for accepts, at_once in ((False, 6), (True, 13)):
        policy = adaptive(token_cost={1: 2.0})
        running, lengths = policy.running(), []
        for _ in range(6400):
            lengths.append(policy.choose(1, running, MOST))
            running.update(lengths[-1], lengths[-1] * accepts)
        assert lengths[: at_once + 1] == [1] * at_once + [0]
        assert sum(lengths) <= 13 + 6400 // 64
    assert set(lengths) == {0, 1}


def test_a_trial_is_known_as_one():
    """So that a plain one need not be a whole chunk."""
    policy = adaptive()
    running = policy.running()
    chosen = []
    for cycle in range(200):
        chosen.append((policy.choose(1, running, 4), running.trial))
        running.update(chosen[-1][0], chosen[-1][0])
        policy.observe(1, chosen[-1][0], cycle, cycle + PLAIN_S * (1 + 0.1 * chosen[-1][0]))
    assert set(chosen) == {(4, False), (0, True)}


def test_a_request_whose_text_changes_goes_its_own_way():
    """Beside many requests that accept little, one that accepts much drafts more after a few cycles."""
    policy = adaptive(token_cost={1: 0.1})
    Load(policy).serve(3000, 0.3, 0.1)
    good, usual = policy.running(), policy.running()
    for _ in range(10):
        good.update(4, 4)
    assert good.rate > 0.65 > 0.5 > usual.rate
    assert policy.choose(1, good, MOST) > policy.choose(1, usual, MOST) >= 1
    for _ in range(200):
        good.update(0, 0)  # what was accepted long ago says little
    assert good.rate < 0.5


def test_single_stalls_do_not_change_the_choice():
    """Every 100th cycle takes 50 times as long."""
    load = Load(adaptive())
    speed = load.serve(6000, 0.6, 0.1, stall=lambda cycle: 50.0 if cycle % 100 == 37 else 1.0)
    assert speed >= 0.95 * best_fixed(0.6, 0.1)[1]


def test_every_load_has_costs_of_its_own():
    """At one request drafting pays, at 16 it does not; cycles of both come in turns of 50."""
    policy = adaptive()
    low, high = Load(policy, in_flight=1), Load(policy, in_flight=16, seed=1)
    for _ in range(100):
        low.serve(50, 0.6, 0.1)
        high.serve(50, 0.6, 1.1)
    assert np.median(low.lengths[1000:]) >= 3
    assert np.median(high.lengths[1000:]) == 0
    near = policy.choose(12, policy.running(), MOST)  # 9 to 16 are one range
    assert near <= 1


class Crowd:
    """Requests that share one machine: it takes all draft steps that wait in one pass, then all verifications that
    wait in one. A pass takes a fixed time and so much a token, with noise; a request comes to its next pass when this
    one is done. A plain call takes up to `chunk` passes; a request's first pass reads its prompt as well, which takes
    `prompt_s`."""

    def __init__(
        self,
        choose,
        *,
        clients,
        rate,
        plain_s,
        token_s,
        draft_s,
        answer=64,
        chunk=1,
        prompt_s=0.0,
        noise=0.1,
        seed=0,
    ):
        self.choose, self.clients, self.rate, self.noise = choose, clients, rate, noise
        self.plain_s, self.token_s, self.draft_s, self.prompt_s = plain_s, token_s, draft_s, prompt_s
        self.answer, self.chunk = answer, chunk
        self.random, self.now_s = random.Random(seed), 0.0

    def serve(self, num_tokens, policy=None):
        """Emitted tokens a second; all clients begin at the same time."""
        begin_s, emitted = self.now_s, 0
        waiting = [self._begin(policy) for _ in range(self.clients)]
        while emitted < num_tokens:
            drafting = [one for one in waiting if one.drafted < one.length]
            if drafting:
                self._pass(self.draft_s)
                for one in drafting:
                    one.drafted += 1
                # Half of the requests are a step behind the others, so that phases do not stay in step.
                verifying = [one for one in waiting if one.drafted >= one.length and self.random.random() < 0.5]
            else:
                verifying = list(waiting)
            if not verifying:
                continue
            tokens, prompts = sum(one.length + 1 for one in verifying), sum(not one.has_read for one in verifying)
            self._pass(self.plain_s + self.token_s * tokens + self.prompt_s * prompts)
            for one in verifying:
                accepted = 0
                while accepted < one.length and self.random.random() < self.rate:
                    accepted += 1
                emitted, one.left, one.passes = emitted + accepted + 1, one.left - accepted - 1, one.passes + 1
                one.has_read = True
                if one.left > 0 and one.passes < one.most_passes:
                    continue
                if policy:
                    one.running.update(one.length, accepted)
                    passes = 1 if one.length else one.passes
                    policy.observe(self.clients, one.length, one.began_s, self.now_s, passes=passes, fresh=one.fresh)
                if one.left <= 0:
                    waiting[waiting.index(one)] = self._begin(policy)
                else:
                    one.fresh = 1
                    self._next(one)
        return emitted / (self.now_s - begin_s)

    def _pass(self, seconds):
        self.now_s += seconds * max(self.random.gauss(1, self.noise), 0.1)

    def _begin(self, policy):
        running = policy.running() if policy else None
        fresh = 2 * MOST if self.prompt_s else 1
        one = SimpleNamespace(running=running, left=self.answer, fresh=fresh, has_read=False)
        self._next(one)
        return one

    def _next(self, one):
        one.began_s, one.drafted, one.passes = self.now_s, 0, 0
        one.length = self.choose(self.clients, one.running, max(0, min(MOST, one.left - 1)))
        tries = one.running and one.running.trial
        one.most_passes = 1 if one.length or (tries and self.clients == 1) else 4 if tries else self.chunk


MACHINES = {  # seconds of a pass, of a token in it, of a draft step
    "waits for weights": (0.030, 0.0005, 0.002),
    "computes": (0.002, 0.010, 0.002),
    "both": (0.030, 0.008, 0.004),
    "dear drafts": (0.030, 0.001, 0.020),
}


@pytest.mark.parametrize("clients", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("rate", [0.35, 0.7])
def test_requests_that_share_passes_choose_what_is_good_for_all(clients, machine, rate):
    """Not less than 95 % of the better of no drafts and four, after 2,000 tokens to learn from."""
    plain_s, token_s, draft_s = machine

    def crowd(choose):
        return Crowd(choose, clients=clients, rate=rate, plain_s=plain_s, token_s=token_s, draft_s=draft_s)

    fixed = [crowd(lambda _load, _running, room, most=most: min(most, room)).serve(6000) for most in (0, 4)]
    policy = adaptive()
    shared = crowd(policy.choose)
    shared.serve(2000, policy)
    assert shared.serve(6000, policy) >= 0.95 * max(fixed)


@pytest.mark.parametrize("clients", [2, 8, 16])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(("answer", "goal"), [(16, 0.9), (48, 0.95)])
def test_short_answers_teach_enough(clients, machine, answer, goal):
    """Not less than `goal` of the better one, in the median of five crowds that begin and end together, as those of a
    benchmark do: an answer is one plain call or three, and one of its few cycles has read a prompt.
    """
    plain_s, token_s, draft_s = machine

    def rate(seed, choose, policy=None):
        crowd = Crowd(
            choose,
            clients=clients,
            rate=0.6,
            plain_s=plain_s,
            token_s=token_s,
            draft_s=draft_s,
            answer=answer,
            chunk=16,
            prompt_s=plain_s,
            seed=seed,
        )
        rounds = [crowd.serve(2 * clients * answer, policy) for _ in range(6)]
        return np.mean(rounds[2:])

    ratios = []
    for seed in range(5):
        policy = adaptive()
        fixed = max(rate(seed, lambda _load, _running, room, most=most: min(most, room)) for most in (0, 4))
        ratios.append(rate(seed, policy.choose, policy) / fixed)
    assert np.median(ratios) >= goal


def test_prompts_are_no_slow_verifications():
    """A cycle that reads a prompt takes 100 times as long, and every request has one: as if it had not been."""
    lengths = []
    for prefills in (False, True):
        policy = adaptive()
        load = Load(policy, noise=0.0)
        for _ in range(60):
            if prefills:
                policy.observe(1, 4, 0.0, 2.5, fresh=MOST + 2)
            load.serve(50, 0.6, 0.1)
        lengths.append(load.lengths)
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_left_out(seconds):
    lengths = []
    for times in (0, 40):
        policy = adaptive()
        for cycle in range(times):
            policy.observe(1, 4 * (cycle % 2), 0.0, seconds)
        load = Load(policy)
        load.serve(200, 0.6, 0.1)
        lengths.append(load.lengths)
    assert lengths[0] == lengths[1]


def test_what_is_tried_is_bounded_even_without_any_times():
    """Nothing is ever observed, as when every cycle reads a prompt: at most 6 trials, and one in 64 cycles."""
    policy, lengths = adaptive(), []
    running = policy.running()
    for _ in range(2000):
        lengths.append(policy.choose(1, running, 4))
        running.update(lengths[-1], lengths[-1] // 2)
    assert sum(length != 4 for length in lengths) <= 6 + 2000 // 64
    assert lengths[0] == 0 or lengths[1] == 0


def test_the_share_of_cycles_that_try_something_stays_below_two_percent():
    for rate, cost, usual in ((0.2, 1.1, 0), (0.8, 0.03, MOST)):
        load = Load(adaptive(), noise=0.0)
        load.serve(20_000, rate, cost)
        late = load.lengths[2000:]
        tried = [length for length in late if (length > 0) != (usual > 0)]
        assert 0 < len(tried) <= 0.02 * len(late)


def test_a_tree_is_made_whole_or_not_at_all():
    """Ten nodes, of which three at most follow each other."""

    def serve(mean_accepted, cost):
        policy = DraftLength("adaptive", 10, whole=True)
        running, rng, lengths = policy.running(), random.Random(0), []
        for cycle in range(4000):
            length = policy.choose(1, running, 10)
            accepted = (int(mean_accepted) + (rng.random() < mean_accepted % 1)) if length else 0
            running.update(length, accepted)
            policy.observe(1, length, cycle, cycle + PLAIN_S * (1 + length * cost) * rng.gauss(1, 0.1))
            lengths.append(length)
        assert set(lengths) <= {0, 10}
        return np.mean(np.array(lengths[1000:]) > 0)

    assert serve(1.5, 0.1) > 0.97  # 2.5 tokens in the time of 2
    assert serve(0.5, 0.1) < 0.03  # 1.5 tokens
    scheduled = DraftLength("schedule", 10, {2: 10, 4: 0}, whole=True)
    assert [scheduled.choose(load, scheduled.running(), 7) for load in (1, 2, 3, 5)] == [7, 7, 0, 0]


def test_fixed_and_schedule_choose_by_room_and_load():
    fixed = DraftLength("fixed", MOST)
    assert [fixed.choose(40, fixed.running(), room) for room in (0, 3, 20, -1)] == [0, 3, 20, 0]
    policy = DraftLength("schedule", MOST, {4: 4, 8: 2, 16: 0, 32: 1})
    chosen = {load: policy.choose(load, policy.running(), MOST) for load in (1, 4, 5, 8, 9, 16, 17, 32, 33, 1000)}
    assert chosen == {1: 4, 4: 4, 5: 2, 8: 2, 9: 0, 16: 0, 17: 1, 32: 1, 33: 0, 1000: 0}
    assert [policy.choose(1, policy.running(), room) for room in (0, 1, 3, 4, 5)] == [0, 1, 3, 4, 4]


def test_given_costs_are_interpolated_between_loads():
    policy = adaptive(token_cost={2: 0.1, 10: 0.9})
    running = policy.running()
    for _ in range(30):
        running.update(MOST, 2)  # two of three: 0.67
    lengths = [policy.choose(load, running, MOST) for load in (1, 2, 6, 10, 50)]
    assert lengths[0] == lengths[1] > lengths[2] >= 1
    assert lengths[3:] == [0, 0] or sum(lengths[3:]) <= 2  # one of them may be a trial
    # from where 0.67 stops to pay: load 2 + 8 * (0.67 - 0.1) / 0.8 = 7.7
    assert policy.choose(7, running, MOST) == 1


SETTINGS = [
    DraftLength(),
    DraftLength("schedule", 4, {4: 4, 8: 2, 16: 0}),
    DraftLength("adaptive", 4, token_cost={1: 0.2, 16: 1.1}),
    DraftLength("adaptive", 4, {4: 4}, {1: 1e-05, 3: 1 / 3}, whole=True),
]


@pytest.mark.parametrize("policy", SETTINGS, ids=lambda policy: ",".join(policy.written().values()))
def test_what_is_written_is_read(policy):
    parameters = {"method": "ngram", **policy.written()}
    read = DraftLength.parse(parameters, policy.most, whole=policy.whole)
    for name in ("policy", "most", "schedule", "token_cost", "whole"):
        assert getattr(read, name) == getattr(policy, name)


def test_parameters_have_the_form_of_a_config():
    assert SETTINGS[1].written() == {"draft_length_policy": "schedule", "draft_length_schedule": "4:4,8:2,16:0"}
    assert SETTINGS[2].written() == {"draft_length_policy": "adaptive", "draft_length_token_cost": "1:0.2,16:1.1"}
    assert DraftLength.parse({}, 4).policy == "fixed"


WRONG = {
    "policy": ({"policy": "clever"}, "policy: 'clever'; expected one of fixed, schedule, adaptive"),
    "no schedule": ({"policy": "schedule"}, "schedule: empty; expected loads and lengths such as {4: 4, 8: 2, 16: 0}"),
    "no table": ({"schedule": "4"}, "schedule: '4'; expected a table such as 4:4,8:2,16:0"),
    "empty": ({"schedule": ""}, "schedule: ''; expected a table such as 4:4,8:2,16:0"),
    "twice": ({"schedule": "4:4,4:2"}, "schedule: '4:4,4:2'; expected a table such as 4:4,8:2,16:0"),
    "falling": ({"schedule": "8:4,4:2"}, "schedule: load 4 stands after 8; expected rising loads"),
    "load 0": ({"schedule": "0:4"}, "schedule: load 0; expected 1 or more requests"),
    "too long": ({"policy": "schedule", "schedule": "4:5"}, "schedule: 5 draft tokens at load 4; expected 0 to 4"),
    "negative": ({"schedule": "4:-1"}, "schedule: -1 draft tokens at load 4; expected 0 or more"),
    "words": ({"token_cost": "1:a"}, "token_cost: '1:a'; expected a table such as 1:0.2,16:1.1"),
    "negative cost": ({"token_cost": "1:-0.1"}, "token_cost: cost -0.1 at load 1; expected a finite number from 0 on"),
    "NaN": ({"token_cost": "1:nan"}, "token_cost: cost nan at load 1; expected a finite number from 0 on"),
    "infinite": ({"token_cost": "1:inf"}, "token_cost: cost inf at load 1; expected a finite number from 0 on"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong_parameters_are_named(given, message):
    with pytest.raises(ValueError) as refused:
        DraftLength.parse({f"draft_length_{name}": text for name, text in given.items()}, 4)
    assert str(refused.value) == f"parameter draft_length_{message}"


def test_costs_that_are_given_must_be_some():
    with pytest.raises(ValueError, match="token_cost: empty; expected loads and costs"):
        adaptive(token_cost={})


def test_one_object_serves_many_threads():
    """Eight threads at loads of their own ranges: nothing is lost, and each load comes to its own length."""
    policy = adaptive()
    places = [(2**range_, 0.1 if range_ < 4 else 1.1) for range_ in range(8)]
    loads = [Load(policy, in_flight=in_flight, seed=in_flight) for in_flight, _ in places]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda place: place[0].serve(2000, 0.6, place[1][1]), zip(loads, places, strict=True)))
    assert policy._num_cycles == sum(len(load.lengths) for load in loads)
    for load, (_, cost) in zip(loads, places, strict=True):
        assert (np.median(load.lengths[1000:]) > 0) == (cost < 0.6)
    assert policy.running().rate == pytest.approx(0.6, abs=0.15)


class ByPolicy:
    """Drafter: asks `policy` how much to draft, at a load and with times that an adversary takes from the text."""

    def __init__(self, inner, policy, load, seconds):
        self._inner, self._policy = inner, policy
        self._load, self._seconds = load, seconds
        self._running = policy.running()
        self._cycle = (1, 0)  # load, drafted
        self._now_s = 0.0
        self.lengths = []

    def propose(self, generation, num_draft_tokens):
        text = tuple(generation.context.tolist())
        load = self._load(text, self.lengths)
        length = self._policy.choose(load, self._running, num_draft_tokens)
        self._cycle = (load, length)
        self.lengths.append(length)
        return self._inner.propose(generation, length) if length else NO_PROPOSAL

    def learn(self, verification):
        load, length = self._cycle
        accepted = verification.num_accepted
        self._running.update(length, accepted)
        seconds = self._seconds(verification.tokens, accepted, length)
        self._policy.observe(load, length, self._now_s, self._now_s + seconds)
        self._now_s += seconds
        self._inner.learn(verification)


TARGET, DRAFT = table_model(3, seed=17, scale=0.8), table_model(3, seed=0, scale=1.0)
PLAIN = Request([1, 0, 2], 4, sampling=SamplingParams(temperature=1.0), plain_chunk_tokens=1)
SPECULATIVE = replace(PLAIN, num_draft_tokens=3)


def law(request, make_drafter):
    """Of whole outputs, and how many sequences of lengths there were."""
    lengths = set()

    def run(choices):
        drafter = make_drafter(DraftModel(TableEngine(DRAFT, uniforms=choices), "auto"))
        *_, last = generate(request, drafter, Target(TableEngine(TARGET, uniforms=choices)))
        lengths.add(tuple(getattr(drafter, "lengths", ())))
        return tuple(last.generation.token_ids.tolist())

    return exact_law(run), len(lengths)


def slow_when_it_was_refused(tokens, accepted, length):
    return 0.01 + length * (0.002 if accepted == length else 0.5) + 0.1 * (tokens[-1] == 0)


POLICIES = {
    # the load is a function of text and past lengths that favours what a draft would have to avoid
    "schedule": (
        lambda: DraftLength("schedule", 3, {1: 3, 2: 0, 3: 1, 4: 2}),
        lambda text, lengths: 1 + (2 * text[-1] + text[-2] + sum(lengths)) % 5,
    ),
    "given costs": (
        lambda: DraftLength("adaptive", 3, token_cost={1: 0.2, 4: 0.9}),
        lambda text, lengths: 1 + (text[-1] + len(lengths)) % 4,
    ),
    "measured costs": (lambda: DraftLength("adaptive", 3), lambda text, lengths: 1 + 3 * (text[-1] == 1)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_outputs_follow_the_target_whatever_the_lengths_depend_on(name):
    """Over every branch of chance, with lengths that depend on text, acceptance and times so far."""
    make, load = POLICIES[name]
    expected, _ = law(PLAIN, lambda inner: None)
    found, histories = law(SPECULATIVE, lambda inner: ByPolicy(inner, make(), load, slow_when_it_was_refused))
    assert histories >= 2
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert distance(found, expected) < 1e-6


def test_a_policy_that_looks_at_the_drafts_is_found_out():
    """Cut before the first 2, a proposal is no longer drawn as it says: the test above sees that."""

    class Cut(ByPolicy):
        def propose(self, generation, num_draft_tokens):
            proposal = super().propose(generation, num_draft_tokens)
            kept = [*proposal.tokens.tolist(), 2].index(2)
            return Proposal(proposal.tokens[:kept], None if proposal.logits is None else proposal.logits[:kept])

    make, load = POLICIES["schedule"]
    expected, _ = law(PLAIN, lambda inner: None)
    found, _ = law(SPECULATIVE, lambda inner: Cut(inner, make(), load, slow_when_it_was_refused))
    assert distance(found, expected) > 0.01


def test_lengths_rise_with_acceptance_and_fall_with_cost():
    def chosen(rate, cost):
        policy = adaptive(token_cost={1: cost})
        running = policy.running()
        for cycle in range(400):
            running.update(1, int(cycle % 10 < 10 * rate))
        return [policy.choose(1, running, MOST) for _ in range(20)][-1]

    by_rate = [chosen(rate, 0.1) for rate in (0.1, 0.3, 0.5, 0.7, 0.9)]
    by_cost = [chosen(0.7, cost) for cost in (0.02, 0.1, 0.3, 0.8)]
    assert all(a <= b for a, b in pairwise(by_rate)) and by_rate[0] < by_rate[-1]
    assert all(a >= b for a, b in pairwise(by_cost)) and by_cost[0] > by_cost[-1] == 0
