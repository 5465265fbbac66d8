"""Compiled TensorRT-LLM engines on a GPU host, through `tensorrt_llm.runtime.ModelRunnerCpp` and no server.

The runner is an engine call of the decoding core, so the cycle, stop strings and every field of a query are those of
`InProcess`. Not yet run on a GPU: written from the interface of TensorRT-LLM 1.2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.decoding.detokenize import shared_length
from trtspec.decoding.engine_call import EngineRequest, EngineResult
from trtspec.decoding.methods import IN_ENGINE, METHODS, DraftEngine, Setting, make_drafter
from trtspec.errors import TrtspecError
from trtspec.parity.subjects.in_process import InProcess
from trtspec.runtime.engine import EngineConfig

KV_CACHE_SHARE = 0.4  # of the free memory of the GPU, for one engine: a draft engine needs as much


class Runner:
    """One compiled engine, loaded on the GPU of this host; one call at a time.

    Args:
        engine_dir: the engine.
        choices: paths of child ranks of the token tree, of an engine with Medusa or EAGLE heads.
        lookahead: window, n-gram and verification set sizes, of an engine built for lookahead.
        kv_cache_share: of the GPU's free memory.

    Raises:
        TrtspecError: no TensorRT-LLM here, or the engine cannot be loaded.
    """

    def __init__(
        self,
        engine_dir: Path,
        *,
        choices: Sequence[Sequence[int]] | None = None,
        lookahead: tuple[int, int, int] | None = None,
        kv_cache_share: float = KV_CACHE_SHARE,
    ) -> None:
        try:
            from tensorrt_llm.runtime import ModelRunnerCpp
        except ImportError as error:
            raise TrtspecError(
                f"TensorRT-LLM cannot be imported: {error}",
                expected="a GPU host with tensorrt_llm 1.2",
                fix="run this in the container that the engines were compiled in, or check the server",
            ) from error
        self.config = EngineConfig.load(engine_dir)
        if not self.config.compiled:
            raise TrtspecError(
                "the engine was prepared, not compiled", where=str(engine_dir), fix="run its build.sh on a GPU host"
            )
        settings: dict[str, Any] = {
            "engine_dir": str(engine_dir),
            "rank": 0,
            "kv_cache_free_gpu_memory_fraction": kv_cache_share,
            "kv_cache_enable_block_reuse": True,
        }
        mode = self.config.stamp.get("speculation") or {}
        choices = mode.get("choices") if choices is None else choices
        if choices is not None:
            name = "eagle_choices" if "num_eagle_layers" in self.config.pretrained else "medusa_choices"
            settings[name] = [list(path) for path in choices]
        if lookahead is not None:
            settings["lookahead_config"] = list(lookahead)
        if self.config.returns_generation_logits:
            settings["gather_generation_logits"] = True
        self._lookahead = lookahead
        # Its answers come through one queue, from which a second caller would take those of the first.
        self._turn = threading.Lock()
        try:
            self._runner = ModelRunnerCpp.from_dir(**settings)
        except Exception as error:  # whatever TensorRT-LLM raises
            raise TrtspecError(f"TensorRT-LLM cannot load the engine: {error}", where=str(engine_dir)) from error

    def execute(self, request: EngineRequest) -> EngineResult:
        """Answer one engine call.

        Raises:
            TrtspecError: the runner cannot do it, or failed.
        """
        import torch

        settings = self._settings(request)
        where = str(self.config.path.parent)
        try:
            with self._turn:
                outputs = self._runner.generate(
                    batch_input_ids=[torch.tensor(request.input_ids.tolist(), dtype=torch.int32)], **settings
                )
        except Exception as error:
            raise TrtspecError(f"TensorRT-LLM failed: {error}", where=where) from error
        start = len(request.input_ids)
        length = int(outputs["sequence_lengths"][0][0])
        ids = outputs["output_ids"][0][0][:length].tolist()
        if ids[:start] != request.input_ids.tolist():
            raise TrtspecError("the answer of TensorRT-LLM does not begin with its input", where=where)
        new = np.array(ids[start:], dtype=np.int32)  # without the end id: the cycle sees that it is short
        logits = log_probs = None
        if request.return_generation_logits:
            # One row a token; in a list where drafts were verified.
            rows = outputs["generation_logits"][0][0].float().cpu().numpy()
            logits = rows.reshape(-1, rows.shape[-1])[: len(new)]
        if request.return_log_probs:
            values = outputs["log_probs"][0][0].float().cpu().numpy()
            log_probs = np.zeros(len(new), dtype=np.float32)
            log_probs[: min(len(values), len(new))] = values[: len(new)]
        drafts = [] if request.draft_tokens is None else request.draft_tokens.tolist()
        return EngineResult(
            output_ids=new,
            generation_logits=logits,
            log_probs=log_probs,
            num_draft_tokens=len(drafts),
            num_accepted=shared_length(new.tolist(), drafts),
        )

    def _settings(self, request: EngineRequest) -> dict[str, Any]:
        """Keywords of `ModelRunnerCpp.generate` for one request; lists have one entry for the one prompt."""
        if request.embedding_bias is not None or request.draft_parents is not None:
            what = "embedding_bias" if request.draft_parents is None else "a token tree"
            raise TrtspecError(f"the runner of TensorRT-LLM does not take {what}", where=str(self.config.path.parent))
        sampling = request.sampling
        end_id = -1 if request.end_id is None else request.end_id
        settings: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "end_id": end_id,
            "pad_id": max(0, end_id),
            "return_dict": True,
            "output_sequence_lengths": True,
        }
        if sampling.greedy:
            settings["top_k"] = 1
        else:
            settings |= {"temperature": sampling.temperature, "random_seed": sampling.seed, "top_p": sampling.top_p}
            settings |= {"top_k": sampling.top_k} if sampling.top_k else {}
            settings |= {"min_p": sampling.min_p} if sampling.min_p else {}
        for name, off in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
            if (value := getattr(sampling, name)) != off:
                settings[name] = value
        if request.min_new_tokens:
            settings["min_tokens"] = request.min_new_tokens
        if request.stop_sequences:
            settings["stop_words_list"] = [[list(words) for words in request.stop_sequences]]
        if request.bad_words:
            settings["bad_words_list"] = [[list(words) for words in request.bad_words]]
        if request.return_generation_logits:
            settings["output_generation_logits"] = True
        if request.return_log_probs:
            settings["output_log_probs"] = True
        if self._lookahead is not None:
            settings["lookahead_config"] = list(self._lookahead)
        if request.draft_tokens is not None:
            settings["draft_tokens_list"] = [request.draft_tokens.tolist()]
        if request.draft_logits is not None:
            import torch

            settings["draft_logits_list"] = [torch.from_numpy(np.ascontiguousarray(request.draft_logits))]
        return settings


def runner_subject(
    runners: Mapping[str, Runner],
    method: str,
    *,
    end_ids: Sequence[int],
    decode: Callable[[list[int]], str],
    continuation_ids: Sequence[int] = (),
    acceptance: Any = "auto",
    settings: Mapping[str, Setting] | None = None,
) -> InProcess:
    """The subject `runner`.

    Args:
        runners: role -> engine: `target`, and those that the method needs.
        method: of speculation, `none`, one of `decoding.methods.METHODS`, or one that is in the engine.
        end_ids, decode, continuation_ids: see `InProcess`.
        acceptance, settings: see `decoding.methods.make_drafter`.

    Raises:
        TrtspecError: the runner cannot do this method.
    """
    target, row = runners["target"], METHODS.get(method)
    if row is not None and row.trees:
        raise TrtspecError(
            f"method {method} proposes token trees, and the runner of TensorRT-LLM takes chains",
            expected="draft_target, ngram or a method that is in the engine",
            fix="check the server: --subject server",
        )
    engines = {
        role: DraftEngine(runner.execute, runner.config.max_seq_len, runner.config.returns_generation_logits)
        for role, runner in runners.items()
        if role != "target"
    }
    return InProcess(
        target.execute,
        None if row is None else partial(make_drafter, method, engines, acceptance, **(settings or {})),
        end_ids=end_ids,
        decode=decode,
        continuation_ids=continuation_ids,
        contexts=(target.config.max_seq_len, row.draft_context(engines) if row else None),
        name="runner",
        logits=target.config.returns_generation_logits,
        drafts_itself=method in IN_ENGINE,
        plain_chunk_tokens=None,
    )
