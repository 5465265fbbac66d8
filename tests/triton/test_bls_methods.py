"""Every method that drafts outside the target's engine, on the real server: one repository, a pipeline for each.

The engines are the tiny pair's: the middle model of the cascade is the noisy copy of the target, its draft the target
itself, so that both levels accept some drafts and reject others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

PROMPTS = ["Hello", "abcabcabc abcabc", "def f(x):\n    return", "0123456789" * 12]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
SETTINGS = {
    "ngram": {"max_ngram": 2, "window": 100},
    "cascade": {"num_draft_tokens": 2},
    "cascades": {"num_draft_tokens": 2},
    "tree": {"branching": (2, 1)},
    "trees": {"branching": (1, 1)},
}
SECTIONS = {
    "ngram": "ngram: {max_ngram: 2, window: 100}",
    "early_exit": "early_exit: {layer: 1}",
    "tree": "draft: {model: ./target-model, dtype: float32}, tree: {branching: [2, 1]}",
    "trees": "draft: {model: ./target-model, dtype: float32}, "
    "tree: {branching: [1, 1], drafts: [{model: ./draft-model, dtype: float32}]}",
    "cascade": "draft: {model: ./target-model, dtype: float32}, "
    "cascade: {num_draft_tokens: 2, middle: {model: ./draft-model, dtype: float32}}",
    "cascades": "draft: {model: ./target-model, dtype: float32}, cascade: {num_draft_tokens: 2, "
    "middle: {model: ./draft-model, dtype: float32}, middles: [{model: ./target-model, dtype: float32}]}",
}
MODELS = {
    "cascade": "tensorrt_llm_bls",
    "cascades": "bls_cascades",  # of two middle models
    "ngram": "bls_ngram",
    "early_exit": "bls_early_exit",
    "tree": "bls_tree",
    "trees": "bls_trees",  # of two drafts
}
DOWN = ("cascade", "cascades", "early_exit", "tree", "trees")  # once more each, with a draft that is not there
ROLES = {
    "ngram": ("target",),
    "early_exit": ("target", "draft"),
    "tree": ("target", "draft"),
    "trees": ("target", "draft", "draft_2"),
    "cascade": ("target", "middle", "draft"),
    "cascades": ("target", "middle", "middle_2", "draft"),
}
END_IDS = (257, 258)


@pytest.fixture(scope="module")
def built(pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`engines` (role -> directory) and the `repository` with a pipeline for each method."""
    from trtspec.models.source import open_model
    from trtspec.runtime.engine import write_torch_engine
    from trtspec.spec.load import load_spec

    root = tmp_path_factory.mktemp("methods")
    engines = {}
    for role, model, max_draft_len in (
        ("target", "target", 5),
        ("middle", "draft", 3),
        ("middle_2", "target", 3),
        ("draft", "target", 0),
        ("draft_2", "draft", 0),
    ):
        engines[role] = root / "engines" / role
        build = {"max_batch_size": 8, "max_input_len": 256, "max_seq_len": 512, "max_draft_len": max_draft_len}
        source = open_model(str(pair.root / f"{model}-model"))
        write_torch_engine(source, engines[role], dtype="float32", role=role, build_config=build, stamp={})
    repositories = {}
    for method, section in SECTIONS.items():
        spec = pair.root / f"{method}.yaml"
        spec.write_text(
            "version: 1\n"
            "target: {model: ./target-model, dtype: float32}\n"
            f"speculation: {{method: {method_of(method)}, num_draft_tokens: 4, {section}}}\n"
            "engine: {max_batch_size: 8, max_input_len: 256, max_seq_len: 512, max_draft_len: 5}\n"
        )
        repositories[method] = pair.write(
            root / method,
            spec=load_spec(spec),
            engines={role: engines[role] for role in ROLES[method]},
            kv_cache_bytes=dict.fromkeys(engines, 32 << 20),
        )
    repository = repositories["cascade"]
    for method, name in MODELS.items():
        if method != "cascade":
            add(repositories[method] / "tensorrt_llm_bls", repository / name)
    for method in DOWN:
        add(repositories[method] / "tensorrt_llm_bls", repository / f"down_{method}", draft="nobody")
    for method, name in (("trees", "tensorrt_llm_draft_2"), ("cascades", "tensorrt_llm_middle_2")):
        add(repositories[method] / name, repository / name)
    return SimpleNamespace(engines=engines, engines_root=root / "engines", repository=repository, root=root)


def method_of(pipeline: str) -> str:
    return {"trees": "tree", "cascades": "cascade"}.get(pipeline, pipeline)


def add(model: Path, place: Path, draft: str | None = None) -> None:
    """A copy of a model under another name, and perhaps with another `draft`; nothing else in its config changes."""
    shutil.copytree(model, place)
    file = place / "config.pbtxt"
    before = file.read_text()
    after = before.replace(f'name: "{model.name}"', f'name: "{place.name}"', 1)
    assert after != before or place.name == model.name
    if draft is not None:
        before, after = after, after.replace('"tensorrt_llm_draft"', f'"{draft}"')
        assert after != before
    file.write_text(after)


@pytest.fixture(scope="module")
def ask(
    triton_class: type, built: SimpleNamespace, free_ports: Callable[[], dict[str, int]]
) -> Iterator[Callable[..., SimpleNamespace]]:
    """Start the server and stream one generation of a method: `text`, `ids`, `blocks`, `last`; `ask.calls(model)`."""
    from trtspec.triton.server import LocalServer

    ports = free_ports()
    server = LocalServer(
        built.repository,
        engines_root=built.engines_root,
        num_threads=1,
        startup_timeout_s=280.0,
        state_dir=built.root / "state",
        **ports,
    )
    with server:
        client = triton_class(f"127.0.0.1:{ports['grpc_port']}")

        def run(prompt: str, method: str, **tensors: object) -> SimpleNamespace:
            settings = {"max_tokens": 24, "stream": True, "exclude_input_in_output": True} | tensors
            responses, error = client.stream(MODELS.get(method, method), text_input=prompt, **settings)
            if error is not None:
                raise error
            blocks = [response["output_ids"].reshape(-1).tolist() for response in responses]
            return SimpleNamespace(
                text="".join(response["text_output"] for response in responses),
                ids=[token for block in blocks for token in block],
                blocks=blocks,
                last=responses[-1],
                responses=responses,
            )

        run.calls = client.calls  # type: ignore[attr-defined]
        yield run
        client.close()


@pytest.mark.parametrize("method", MODELS)
def test_greedy_text_is_the_same_with_and_without_drafts(ask, method: str) -> None:
    """Three letters are preferred, so that the random model repeats itself and a look-up finds something."""
    settings = {"embedding_bias_words": ["a", "b", "c"], "embedding_bias_weights": [10.0] * 3, "max_tokens": 40}
    accepted = drafted = 0
    for prompt in PROMPTS:
        speculated, plain = (ask(prompt, method, num_draft_tokens=count, **settings) for count in (4, 0))
        assert speculated.ids == plain.ids
        assert speculated.text == plain.text
        assert plain.last["total_draft_tokens"] == 0
        drafted += speculated.last["total_draft_tokens"]
        accepted += speculated.last["total_accepted_draft_tokens"]
    assert 0 < accepted < drafted or (method == "early_exit" and accepted == drafted)  # its draft is the target itself


@pytest.mark.parametrize("sampling", [{}, SAMPLED | {"seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["tree", "trees", "cascade"])
def test_logits_with_drafts_are_those_without(ask, method: str, sampling: dict[str, object]) -> None:
    """Also where one path of a tree leads to another, whose call has the logits from there on."""
    settings = {"return_generation_logits": True, "return_log_probs": True, "max_tokens": 40, **sampling}
    settings |= {"use_draft_logits": False} if sampling else {}
    accepted = 0
    for prompt in PROMPTS[:2]:
        answers = [ask(prompt, method, num_draft_tokens=count, **settings) for count in (0, 4)]
        ids, rows, log_probs = [], [], []
        for answer in answers:
            ids.append(answer.ids)
            rows.append(np.concatenate([response["generation_logits"][0, 0] for response in answer.responses]))
            log_probs.append(np.concatenate([response["output_log_probs"][0, 0] for response in answer.responses]))
        assert ids[1] == ids[0]
        assert rows[0].shape == rows[1].shape == (len(ids[0]), 261)
        np.testing.assert_allclose(rows[1], rows[0], atol=1e-4)
        np.testing.assert_allclose(log_probs[1], log_probs[0], atol=1e-4)
        accepted += answers[1].last["total_accepted_draft_tokens"]
    assert accepted > 0


@pytest.mark.parametrize("method", DOWN)
def test_a_draft_that_is_down_changes_no_token(ask, method: str) -> None:
    """What drafts beside or above it goes on: the middle models of a cascade, the second draft of the trees."""
    for settings in ({}, SAMPLED | {"seed": 5, "use_draft_logits": False}):
        down = ask(PROMPTS[0], f"down_{method}", **settings)
        assert down.ids == ask(PROMPTS[0], method, num_draft_tokens=0, **settings).ids
        assert (down.last["total_draft_tokens"] > 0) == (method in ("cascade", "cascades", "trees"))


@pytest.mark.parametrize("settings", [{}, SAMPLED, SAMPLED | {"use_draft_logits": False}])
@pytest.mark.parametrize("method", MODELS)
def test_the_server_says_what_the_same_drafter_says_in_process(
    ask, built: SimpleNamespace, pair: SimpleNamespace, method: str, settings: dict[str, object]
) -> None:
    from trtspec.decoding.request import Request
    from trtspec.decoding.sampling import request_sampling
    from trtspec.runtime.local import speculate
    from trtspec.runtime.torch_runtime import TorchRuntime
    from trtspec.triton.models.tokenization import Tokenization

    runtimes = {role: TorchRuntime(built.engines[role], kv_cache_bytes=32 << 20) for role in ROLES[method]}
    tokenization = Tokenization(pair.root / "target-model" / "tokenizer.json", bos_token_id=256, add_bos=True)
    given = {name: value for name, value in settings.items() if name != "use_draft_logits"}
    for seed, prompt in enumerate(PROMPTS[:3]):
        request = Request(
            prompt_ids=tokenization.encode(prompt),
            max_tokens=24,
            sampling=request_sampling(**given, seed=seed)[0],
            end_ids=END_IDS,
            num_draft_tokens=4,
        )
        # A server's engines take chains: the paths of a tree are accepted by equality.
        acceptance = "tokens" if "use_draft_logits" in settings or method_of(method) == "tree" else "auto"
        own = SETTINGS.get(method)
        blocks = list(speculate(method_of(method), runtimes, request, acceptance=acceptance, settings=own))
        served = ask(prompt, method, seed=seed, **settings)
        assert served.blocks == [list(block.token_ids) for block in blocks]
        assert served.last["total_draft_tokens"] == blocks[-1].generation.acceptance.num_drafted


def test_each_method_calls_its_engines_and_no_others(ask) -> None:
    drafting = ("middle", "middle_2", "draft", "draft_2")
    of_role = {"target": "tensorrt_llm"} | {role: f"tensorrt_llm_{role}" for role in drafting}
    names = tuple(of_role.values())
    for method in MODELS:
        used = tuple(of_role[role] for role in ROLES[method])
        before = {name: ask.calls(name) for name in names}
        ask(PROMPTS[1], method)
        assert tuple(name for name in names if ask.calls(name) > before[name]) == used


@pytest.mark.parametrize("method", MODELS)
def test_end_ids_and_a_minimum_length(ask, method: str) -> None:
    bias = {"embedding_bias_words": ["<|end|>"], "embedding_bias_weights": [200.0]}
    assert ask("Hello", method, **bias).ids == []
    for sampling in ({}, SAMPLED | {"seed": 3}):
        later = ask("Hello", method, min_tokens=5, **bias, **sampling)
        assert (len(later.ids), later.last["finish_reason"]) == (5, "stop")
        assert not set(END_IDS) & set(later.ids)


def test_draft_logits_of_a_look_up_are_refused(ask) -> None:
    with pytest.raises(InferenceServerException, match="use_draft_logits is true; method ngram has none"):
        ask("Hello", "ngram", use_draft_logits=True, **SAMPLED)


def test_the_paths_of_a_tree_are_calls_of_their_own(ask) -> None:
    """Two leaves: two calls of the target in a cycle; of the draft one for the context and one for the second child."""
    before = {name: ask.calls(name) for name in ("tensorrt_llm", "tensorrt_llm_draft")}
    answer = ask("Hello", "tree", max_tokens=5, seed=1, **SAMPLED)
    cycles = len(answer.blocks)
    sizes = answer.last["total_draft_tokens"]
    assert sizes >= 4 and cycles >= 2  # the first tree is whole: four nodes
    assert ask.calls("tensorrt_llm") - before["tensorrt_llm"] > cycles
    assert ask.calls("tensorrt_llm_draft") - before["tensorrt_llm_draft"] > 1


def test_sampled_text_of_a_tree_is_that_of_plain_decoding(ask) -> None:
    """All calls draw with the same random numbers, so own tokens in other paths are gone on with, and nothing else."""
    accepted = longest = 0
    for seed in range(6):
        grown, plain = (ask("Hello", "tree", num_draft_tokens=n, seed=seed, **SAMPLED) for n in (4, 0))
        assert grown.ids == plain.ids
        accepted += grown.last["total_accepted_draft_tokens"]
        longest = max(longest, *(len(block) for block in grown.blocks))
    assert accepted > 0 and longest == 3


def test_trees_of_several_requests_at_once(ask) -> None:
    """More calls than the engines take in one batch, and each request gets its own answers."""
    plain = [ask(prompt, "tree", num_draft_tokens=0).ids for prompt in PROMPTS * 2]
    with ThreadPoolExecutor(len(plain)) as threads:
        grown = list(threads.map(lambda prompt: ask(prompt, "tree").ids, PROMPTS * 2))
    assert grown == plain


def test_draft_logits_of_a_tree_are_refused(ask) -> None:
    with pytest.raises(InferenceServerException, match="use_draft_logits is true; the paths of a tree are accepted by"):
        ask("Hello", "tree", use_draft_logits=True, **SAMPLED)


@pytest.mark.parametrize("method", MODELS)
def test_more_drafts_than_the_target_verifies_are_refused(ask, method: str) -> None:
    with pytest.raises(InferenceServerException, match="num_draft_tokens is 6; the target engine verifies at most 5"):
        ask("Hello", method, num_draft_tokens=6)


def test_log_probabilities_of_a_cascade(ask) -> None:
    values = []
    for num_draft_tokens in (0, 4):
        answer = ask("Hello", "cascade", stream=False, return_log_probs=True, num_draft_tokens=num_draft_tokens)
        values.append(answer.last["output_log_probs"].reshape(-1))
    assert len(values[0]) == 24
    np.testing.assert_allclose(values[1], values[0], atol=1e-4)
